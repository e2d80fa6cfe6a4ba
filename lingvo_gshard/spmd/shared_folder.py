"""Checks that several processes share a folder, before one of them waits there for another."""

import contextlib
import os
import pathlib
import secrets
import time
import zlib
from collections.abc import Iterator

import jax
import numpy as np

from lingvo_gshard.spmd import processes
from xla_spmd.files import storage

_SHOWN_SECS = 60.0  # A network disk may take so long to show another machine's file.


def check(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError, in all processes, unless they share a folder. All must call it.

    Process 0 writes a file there, or where the folder would be, and the others look for it.
    """
    if jax.process_count() == 1:
        return
    # Only this machine has its copy of a bucket.
    origin = storage.origin(folder)
    if origin != storage.path(folder):
        raise ValueError(f"{origin}: several processes need a folder on a disk that they share.")
    if storage.is_bucket(origin):
        return

    with _token(pathlib.Path(folder)) as token:
        # The folder may be missing, and then its name must be the same, too.
        name = zlib.crc32(str(pathlib.Path(folder).relative_to(token.parent)).encode()) >> 1
        has_same_name = processes.of_first(name) == name
        others = _where(not has_same_name)
        blind = _where(has_same_name and not _appears(token))
    if others:
        raise ValueError(
            f"{folder}: process {others} and process 0 have different folders: give all "
            "the same folder, on a disk that they share."
        )
    if blind:
        raise ValueError(
            f"{folder}: process 0 wrote a file there, which process {blind} does not see: give all "
            "the same folder, on a disk that they share."
        )


def _where(is_here: bool) -> str:
    """Returns the numbers of the processes where something is true, such as `1, 3`, or ""."""
    found = [0] * jax.process_count()
    found[processes.index()] = int(is_here)
    return ", ".join(map(str, np.flatnonzero(processes.largest(found))))


@contextlib.contextmanager
def _token(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a file that process 0 has written, and deletes at the end."""
    # A folder that does not exist is not made yet, so that a refused start leaves nothing behind.
    # Process 0 chooses for all: it may make the folder before another process has looked for it.
    above = [folder, *folder.parents]
    exists = [candidate.is_dir() for candidate in above]
    # A shallower path of another process ends there, too, and then does not see the file.
    parent = above[min(processes.of_first(exists.index(True)), len(above) - 1)]
    number = processes.of_first(secrets.randbelow(2**31 - 1))
    path = parent / f".lingvo_gshard-{number}"
    if processes.is_first():
        path.touch()
    processes.wait_for_all()
    try:
        yield path
    finally:
        if processes.is_first():
            path.unlink(missing_ok=True)


def _appears(path: pathlib.Path) -> bool:
    """Returns whether a file is there; a network disk may show it late."""
    deadline = time.monotonic() + _SHOWN_SECS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.listdir(path.parent)  # It makes NFS ask its server again.
        time.sleep(0.1)
    return True
