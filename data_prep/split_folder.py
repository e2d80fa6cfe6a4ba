"""The files of a folder of text, which has one of two layouts.

DIR/{train,dev,test}/<name><suffix>[.gz]    split already
DIR/<name><suffix>[.gz]                     the build holds out dev and test
"""

import pathlib
from collections.abc import Iterator

from lingvo_gshard.input.manifest import SPLITS


def files_in(
    path: pathlib.Path, suffix: str, expected_name: str
) -> Iterator[tuple[str | None, pathlib.Path]]:
    """Yields each file's split, None without one, and its path.

    Raises ValueError, with the name that is expected, if the folder or its training text is
    missing.
    """
    if not path.is_dir():
        raise ValueError(f"no input folder {path}")
    # Split already, or to be split.
    folders: dict[str | None, pathlib.Path] = {split: path / split for split in SPLITS}
    if not any(folder.is_dir() for folder in folders.values()):
        folders = {None: path}

    num_files = 0
    for split, folder in folders.items():
        for file in sorted([*folder.glob(f"*{suffix}"), *folder.glob(f"*{suffix}.gz")]):
            num_files += 1
            yield split, file

        if num_files == 0:  # The first folder is that of training text.
            name = f"{expected_name}{suffix}"
            raise ValueError(f"no {name} or {name}.gz files in {folder}")
