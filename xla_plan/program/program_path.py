"""Paths of programs, which are checked before JAX is imported; program_file.py reads the files."""

import pathlib

from xla_spmd.files import storage

# A program does not contain weights, and a protobuf or a flatbuffer cannot be larger.
_MAX_BYTES = 2**31


def check(what: str, path: pathlib.Path) -> None:
    """Raises ValueError, prefixed by `what`, if a file, not read yet, cannot be a program."""
    if path.is_dir():
        raise ValueError(f"{what}: this is a folder, expected a file.")
    if not path.is_file():
        raise ValueError(f"{what}: there is no such file.")

    size_bytes = storage.size_bytes(path)
    if size_bytes == 0:
        raise ValueError(f"{what}: the file is empty.")
    if size_bytes > _MAX_BYTES:
        raise ValueError(
            f"{what}: {size_bytes / 2**30:.1f} GiB are too large for a program, at most "
            f"{_MAX_BYTES / 2**30:.0f} GiB are read; weights should be arguments, not constants."
        )
