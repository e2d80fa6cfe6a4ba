"""Digests of a checkpoint's files: written last, they make it whole; checked, they find damage."""

from __future__ import annotations

import hashlib
import json
import pathlib
import time
from concurrent.futures import ThreadPoolExecutor

from lingvo_gshard.core import atomic_file

_DIGESTS = "digests.json"


class DamagedCheckpointError(ValueError):
    """A checkpoint's files are not those that were written."""


def exist(folder: pathlib.Path) -> bool:
    """Whether the checkpoint in `folder` was written to its end."""
    return (folder / _DIGESTS).exists()


def write(folder: pathlib.Path) -> None:
    """Declares the checkpoint in `folder` whole."""
    content = {"time": time.time(), "files": _sha256s(folder)}
    atomic_file.write(folder / _DIGESTS, json.dumps(content, indent=1))


def remove(folder: pathlib.Path) -> None:
    """Declares it not whole: from now on nobody restores it."""
    (folder / _DIGESTS).unlink(missing_ok=True)


def time_written(folder: pathlib.Path) -> float:
    """Seconds since 1970 when it became whole; DamagedCheckpointError if that can't be read."""
    return _read(folder)[0]


def check(folder: pathlib.Path) -> None:
    """DamagedCheckpointError, naming the file, unless every file is as it was written."""
    _, written = _read(folder)
    found = _sha256s(folder)
    for name in sorted(written.keys() | found.keys()):
        if written.get(name) != found.get(name):
            what = "is missing" if name not in found else "was changed"
            raise _damaged(folder, f"{name} {what}")


def _read(folder: pathlib.Path) -> tuple[float, dict[str, str]]:
    try:
        content = json.loads((folder / _DIGESTS).read_bytes())
        return float(content["time"]), dict(content["files"])
    except (ValueError, TypeError, KeyError):
        raise _damaged(folder, f"{_DIGESTS} is no list of digests") from None


def _damaged(folder: pathlib.Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{folder}: the checkpoint is damaged: {what}.")


def _sha256s(folder: pathlib.Path) -> dict[str, str]:
    """sha256 by relative name of every file under `folder` but the digests themselves."""
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(_DIGESTS)
    ]
    with ThreadPoolExecutor() as pool:  # Hashing leaves Python's lock to others.
        return {
            str(file.relative_to(folder)): digest
            for file, digest in zip(files, pool.map(_sha256, files), strict=True)
        }


def _sha256(file: pathlib.Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
