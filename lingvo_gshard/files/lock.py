"""Locks of what one process writes at a time, such as a run's folder; all programs use these.

The system releases a lock when its process ends, however it ends, also over the network if its disk
has locks. Processes that the holder has forked do not hold it.
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
    """Locks a file or folder that is going to be written.

    Args:
      target: What is locked, whether it exists or not.
      doing: What another process that has locked it does, such as "trains in this folder".
      file: The file of the lock, `target`.lock by default. It is deleted at the end.

    Raises:
      ValueError: if another process has locked it.
      OSError: if its disk has no locks, or cannot be written.
    """
    if file is None:
        # A link and what it leads to are the same.
        resolved = pathlib.Path(target).resolve()
        file = resolved.with_name(f"{resolved.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)

    locked = _locked(file)
    if locked is None:
        raise ValueError(f"{target}: another process {doing}; wait for it, or choose another.")
    try:
        yield
    finally:
        # Deleted first: whoever locks it from here on notices that it is gone.
        file.unlink(missing_ok=True)
        locked.close()


def _locked(path: pathlib.Path) -> IO[bytes] | None:
    """Returns a lock's open file, which closes the lock with it; None if another process has it."""
    while True:
        file = path.open("ab")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:  # It lacks the file's name.
            file.close()
            raise OSError(error.errno, error.strerror, str(path)) from error

        # The process that had it may have deleted the file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()
