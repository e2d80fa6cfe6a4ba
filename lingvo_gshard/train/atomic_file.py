"""Files that are whole or as they were, whenever the process or the machine ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


def write(path: str | pathlib.Path, content: str | bytes) -> None:
    """Writes a file under another name, and gives it its own once it is on disk."""
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    with naming(partial), partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """An OSError names the file: that of a write, to a full disk say, does not by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
