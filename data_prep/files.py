"""Writes the files of tasks, each as a whole or not at all.

On a cluster, a task that was given up as lost may still run while another process repeats it. Both
write the same bytes under temporary names of their own, so whichever ends later changes nothing.
"""

import functools
import pathlib
import uuid

import numpy as np

from lingvo_gshard.core import atomic_file

replacing = functools.partial(atomic_file.replacing, suffix=f".{uuid.uuid4().hex}.partial")


def save_array(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes an array as np.save does."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.save(file, array)
