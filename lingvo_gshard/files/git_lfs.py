"""Git-lfs pointers, which a clone has in place of large files that were not fetched."""

import pathlib

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def check(path: pathlib.Path) -> None:
    """Raises ValueError if the file exists and is a git-lfs pointer."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        beginning = file.read(len(_BEGINNING))
    if beginning == _BEGINNING:
        raise ValueError(
            f"{path} is a git-lfs pointer, not the file itself: run `git lfs pull` in the folder."
        )
