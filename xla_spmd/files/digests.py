"""Digests of files: recorded when a file is written, and checked when it is read.

Every folder that programs read back has a JSON file with the digests of its other files and of
itself: the manifest of prepared data, bundle.json of a bundle, experiment.json of a run. A file
that was damaged, cut short or exchanged is refused by name wherever it is read.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from xla_spmd.files import atomic_file, json_records, storage
from xla_spmd.runtime import progress

_Result = TypeVar("_Result")
_DIGEST = "digest"
_PACKAGES = ("lingvo_gshard", "xla_plan", "xla_spmd")  # The code of the library.
_FILES_PER_TASK = 16
_THREADS = 32
_ADVICE = "it was damaged or exchanged; put the right file back, or make the folder again"


@dataclasses.dataclass(frozen=True)
class File:
    """A file; `path` is relative to the folder that lists it, `sha256` is in hex."""

    path: str
    size_bytes: int
    sha256: str


def describe(folder: str | os.PathLike[str], path: str) -> File:
    """Returns the size and the SHA-256 of `folder/path`."""
    full_path = pathlib.Path(folder, path)
    status = full_path.stat()
    return File(path, status.st_size, _sha256(str(full_path), *_times(status)))


def local(folder: str | os.PathLike[str], file: File) -> pathlib.Path:
    """Returns the local path of a file that a folder lists.

    Raises OSError if a file in a bucket cannot be read, and ValueError if its SHA-256 differs.
    """
    return storage.cached(folder, file.path, file.sha256)


def verify(folder: str | os.PathLike[str], files: Sequence[File], *, contents: bool = True) -> None:
    """Checks the sizes and, if `contents`, the SHA-256 of files that a folder lists.

    Raises ValueError if a file is missing or differs. A file is hashed again only if it was
    modified since.
    """

    def check_some(start: int) -> None:
        for file in files[start : start + _FILES_PER_TASK]:
            _check_size(f"{folder}/{file.path}", file)
            if contents:
                _check_contents(str(local(folder, file)), file)

        num_bytes = sum(file.size_bytes for file in files[start : start + _FILES_PER_TASK])
        done.update(num_bytes)

    # A network disk answers many threads at once, and hashing releases the interpreter's lock.
    starts = range(0, len(files), _FILES_PER_TASK)
    num_bytes = sum(file.size_bytes for file in files)
    with progress.shown(f"checking {folder}", total=num_bytes, unit=progress.BYTES) as done:
        storage.in_threads(check_some, starts, num_threads=_THREADS)


def _check_size(path: str, file: File) -> None:
    try:
        size = storage.size_bytes(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; put it back, or make the folder again.") from error
    if size != file.size_bytes:
        raise ValueError(f"{path} has {size} bytes, not the {file.size_bytes} written: {_ADVICE}.")


def _check_contents(path: str, file: File) -> None:
    sha256 = _sha256(path, *_times(os.stat(path)))
    if sha256 != file.sha256:
        raise ValueError(f"{path} has SHA-256 {sha256}, not the {file.sha256} written: {_ADVICE}.")


def _times(status: os.stat_result) -> tuple[int, int]:
    """Returns when a file's contents last changed, and when the file or its metadata did.

    Programs can set the first time, but not the second.
    """
    return status.st_mtime_ns, status.st_ctime_ns


@functools.cache
def _sha256(path: str, mtime_ns: int, ctime_ns: int) -> str:
    """Returns the SHA-256 of a file, which is read again only if its times are new."""
    del mtime_ns, ctime_ns  # Keys of the cache.
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_json(*values: Any) -> str:
    """Returns the SHA-256 of JSON-able values, which is the same once they are read back."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def of_library(*parts: str) -> str:
    """Returns the SHA-256 of the library's code, or of some of its modules and packages.

    `parts` are paths such as `xla_plan/cost`; by default they are the library's packages.
    """
    packages = pathlib.Path(__file__).parents[2]
    files: list[pathlib.Path] = []
    for part in parts or _PACKAGES:
        path = packages / part
        files += [path] if path.is_file() else path.rglob("*.py")
    files.sort()
    return of_json([_sha256(str(path), *_times(path.stat())) for path in files])


def with_digest(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a JSON object with their digest, which `pop_digest` checks."""
    return fields | {_DIGEST: of_json(fields)}


def pop_digest(fields: dict[str, Any]) -> bool:
    """Removes the digest of an object that was read; returns whether it matches the other fields.

    The digest is of the values, so that the layout of the JSON does not matter.
    """
    digest = fields.pop(_DIGEST, None)
    return bool(digest == of_json(fields))


def write_json(path: str | os.PathLike[str], version: int, fields: dict[str, Any]) -> None:
    """Writes a JSON object with its version and its digest; `path` is never half written."""
    fields = {"version": version, **fields}
    text = json.dumps(with_digest(fields), indent=1)
    atomic_file.write(pathlib.Path(path), text + "\n")


def read_json(
    path: str | os.PathLike[str],
    version: int,
    build: Callable[[dict[str, Any]], _Result],
) -> _Result:
    """Returns build(fields) of an object that `write_json` wrote.

    Raises ValueError, which names the file, if the file is missing, damaged or of another version,
    or if `build` raises KeyError, TypeError, AttributeError or ValueError.
    """
    try:
        fields = json_records.parse(storage.path(path).read_bytes())
        found_version = fields.get("version")
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: it is not a JSON object ({error}).") from error

    # The version is checked first, since a file of another version may lack a digest.
    if found_version != version:
        problem = "no version" if found_version is None else f"version {found_version}"
        raise ValueError(f"{path} has {problem}, expected {version}; make the folder again.")

    if not pop_digest(fields):
        raise ValueError(f"{path} is damaged: its contents do not match its digest.")

    try:
        return build(fields)
    except KeyError as error:
        raise ValueError(
            f"{path} has no {error}: another version wrote it; use that version, or make the "
            "folder again."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
