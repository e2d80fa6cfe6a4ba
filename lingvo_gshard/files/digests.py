"""Digests of files: noted when a file is written, and checked when it is read.

A folder that is computed with has a JSON file that lists the others, and that holds a digest of
itself: the manifest of prepared data, bundle.json, the experiment.json of a run. So a file that was
damaged, cut short or exchanged is refused by its name, wherever it is read.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lingvo_gshard.files import atomic_file, storage

_Result = TypeVar("_Result")
_DIGEST = "digest"
_FILES_PER_TASK = 16
_ADVICE = "it was damaged or exchanged; put the right file back, or make the folder again"


@dataclasses.dataclass(frozen=True)
class File:
    """A file; `path` is relative to the folder that lists it, `sha256` is in hex."""

    path: str
    size_bytes: int
    sha256: str


def describe(folder: str | os.PathLike[str], path: str) -> File:
    """Returns the size and hash of `folder/path`."""
    full_path = pathlib.Path(folder, path)
    found = full_path.stat()
    return File(path, found.st_size, _sha256(str(full_path), *_times(found)))


def local(folder: str | os.PathLike[str], file: File) -> pathlib.Path:
    """Returns the path of a file that a folder lists; for one in a bucket, see storage.cached."""
    return storage.cached(folder, file.path, file.sha256)


def verify(folder: str | os.PathLike[str], files: Sequence[File], *, contents: bool = True) -> None:
    """Checks the sizes and, if `contents`, the SHA-256 of files that a folder lists.

    Raises ValueError for one that is missing or differs. A file is hashed again only if modified.
    """

    def check_some(start: int) -> None:
        for file in files[start : start + _FILES_PER_TASK]:
            _check_size(f"{folder}/{file.path}", file)
            if contents:
                _check_contents(str(local(folder, file)), file)

    # A network's disk answers many threads at once, and hashing releases the interpreter's lock.
    storage.each(check_some, range(0, len(files), _FILES_PER_TASK), num_threads=32)


def _check_size(path: str, file: File) -> None:
    try:
        size = storage.size_bytes(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; put it back, or make the folder again.") from error
    if size != file.size_bytes:
        raise ValueError(f"{path} has {size} bytes, not the {file.size_bytes} written: {_ADVICE}.")


def _check_contents(path: str, file: File) -> None:
    if (sha256 := _sha256(path, *_times(os.stat(path)))) != file.sha256:
        raise ValueError(f"{path} has SHA-256 {sha256}, not the {file.sha256} written: {_ADVICE}.")


def _times(found: os.stat_result) -> tuple[int, int]:
    """The times of the last change of a file's contents, which can be set, and of anything."""
    return found.st_mtime_ns, found.st_ctime_ns


@functools.cache
def _sha256(path: str, mtime_ns: int, ctime_ns: int) -> str:
    del mtime_ns, ctime_ns
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_json(*parts: Any) -> str:
    """Returns the SHA-256 of JSON-able values, which is the same once they are read back."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def of_library() -> str:
    """Returns the SHA-256 of this library's code."""
    files = sorted(pathlib.Path(__file__).parents[1].rglob("*.py"))
    return of_json([_sha256(str(path), *_times(path.stat())) for path in files])


def write_json(path: str | os.PathLike[str], version: int, fields: dict[str, Any]) -> None:
    """Writes an object with its version and its digest, whole or not at all."""
    fields = {"version": version, **fields}
    text = json.dumps(fields | {_DIGEST: of_json(fields)}, indent=1)
    atomic_file.write(pathlib.Path(path), text + "\n")


def read_json(
    path: str | os.PathLike[str],
    version: int,
    build: Callable[[dict[str, Any]], _Result],
    older: Sequence[int | None] = (),
) -> _Result:
    """Returns build(fields) of an object that `write_json` wrote.

    Files of the `older` versions may lack a digest, and None is that of files without a version.
    Raises ValueError, which names the file, if it is missing, damaged, or of another version, or if
    `build` lacks a field or raises TypeError, AttributeError or ValueError.
    """
    try:
        fields = json.loads(storage.path(path).read_bytes())
        digest = fields.pop(_DIGEST, None)
        found = fields.get("version")
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: it holds no JSON object ({error}).") from error
    if found not in (version, *older):
        problem = "no version" if found is None else f"version {found}"
        raise ValueError(f"{path} has {problem}, expected {version}; make the folder again.")
    if digest != of_json(fields) and not (digest is None and found in older):
        raise ValueError(f"{path} is damaged: it is not what was written.")
    try:
        return build(fields)
    except KeyError as error:
        raise ValueError(f"{path} has no {error}.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
