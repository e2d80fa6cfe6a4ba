"""The files of a folder of text, which has one of two layouts.

DIR/{train,dev,test}/<name><suffix>[.gz]    split already
DIR/<name><suffix>[.gz]                     the build holds out dev and test
"""

import pathlib
from collections.abc import Collection, Iterator

from absl import logging

from lingvo_gshard.input.manifest import SPLITS


def files_in(
    path: pathlib.Path, suffix: str, expected_name: str
) -> Iterator[tuple[str | None, pathlib.Path]]:
    """Yields each file's split, None if there are no splits, and its path.

    Raises ValueError, with the expected name, if the folder or its training text is missing.
    """
    if not path.is_dir():
        if path.exists():
            raise ValueError(f"{path} is a file; expected the folder of such files")
        raise ValueError(f"no input folder {path}")
    # Split already, or to be split by the build.
    folders: dict[str | None, pathlib.Path] = {split: path / split for split in SPLITS}
    if not any(folder.is_dir() for folder in folders.values()):
        folders = {None: path}

    num_files = 0
    for split, folder in folders.items():
        for file in sorted([*folder.glob(f"*{suffix}"), *folder.glob(f"*{suffix}.gz")]):
            num_files += 1
            yield split, file

        if num_files == 0:  # The first folder is for training text.
            name = f"{expected_name}{suffix}"
            raise ValueError(f"no {name} or {name}.gz files in {folder}")


def warn_of_unread(path: pathlib.Path, read: Collection[pathlib.Path]) -> None:
    """Warns about files and folders of a folder of text that are not among the files `read`.

    These have other endings or names. Hidden files are not reported.
    """
    # A folder counts as read if a file in it is read.
    read_paths: set[pathlib.Path] = set()
    for file in map(pathlib.Path.resolve, read):
        read_paths.update((file, *file.parents))

    unread: list[str] = []
    for folder in (path, *(path / split for split in SPLITS)):
        if not folder.is_dir():
            continue
        for entry in sorted(folder.iterdir()):
            if entry.resolve() not in read_paths and not entry.name.startswith("."):
                unread.append(str(entry.relative_to(path)))

    if unread:
        logging.warning(
            "%s: not read: %s; docs/data.md lists the names that are read", path, ", ".join(unread)
        )
