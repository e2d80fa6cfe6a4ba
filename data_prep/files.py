"""Writes the files of tasks, each as a whole or not at all.

On a cluster, a task that was given up as lost may still run while another process repeats it. Both
write the same bytes under temporary names of their own, so whichever ends later changes nothing.
"""

import functools
import pathlib
import uuid

import numpy as np

from lingvo_gshard.core import atomic_file

_PARTIAL = ".partial"
replacing = functools.partial(atomic_file.replacing, suffix=f".{uuid.uuid4().hex}{_PARTIAL}")


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file of bytes."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def save_array(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes an array as np.save does."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.save(file, array)


def delete_partial(folder: pathlib.Path) -> None:
    """Deletes what killed processes have left in a folder and those in it."""
    for path in folder.rglob(f"*{_PARTIAL}"):
        path.unlink(missing_ok=True)
