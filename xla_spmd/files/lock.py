"""Locks for files that only one process at a time may write, such as a run's folder.

The system releases a lock when its process ends, however it ends; also on a network disk, if that
supports locks. Processes forked by the holder do not hold the lock.
"""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def held(
    target: str | os.PathLike[str], doing: str, file: pathlib.Path | None = None
) -> Iterator[None]:
    """Locks a file or folder that is about to be written.

    Args:
      target: The file or folder, whether it exists or not.
      doing: What another process does while it holds the lock, such as "trains in this folder".
      file: The lock file, by default `target`.lock. It is deleted at the end.

    Raises:
      ValueError: if another process holds the lock.
      OSError: if the disk does not support locks, or cannot be written.
    """
    if file is None:
        # A link and its target share one lock.
        resolved = pathlib.Path(target).resolve()
        file = resolved.with_name(f"{resolved.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)

    locked = _locked(file)
    if locked is None:
        raise ValueError(f"{target}: another process {doing}; wait for it, or choose another.")
    try:
        yield
    finally:
        # The file is deleted first: whoever locks it from here on notices that it is gone.
        file.unlink(missing_ok=True)
        locked.close()


def _locked(path: pathlib.Path) -> IO[bytes] | None:
    """Returns the lock's open file, which unlocks when closed; None if another process holds it."""
    while True:
        file = path.open("ab")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:  # The error lacks the file's name.
            file.close()
            raise OSError(error.errno, error.strerror, str(path)) from error

        # The former holder may have deleted the file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()
