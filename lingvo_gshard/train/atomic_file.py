"""Files that are whole or as they were, whenever the process or the machine ends."""

from __future__ import annotations

import os
import pathlib


def write(path: str | pathlib.Path, content: str | bytes) -> None:
    """Writes a file under another name, and gives it its own once it is on disk."""
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
