"""Finding the files of a corpus folder, in either of two layouts.

DIR/{train,dev,test}/<lang>-en.tsv[.gz]    already split
DIR/<lang>-en.tsv[.gz]                     dev and test are held out by the build
"""

import pathlib
import re

from data_prep import languages
from data_prep.sources.line_files import TsvFile
from lingvo_gshard.input.manifest import SPLITS

_NAME = re.compile(r"([A-Za-z0-9_-]+)-en\.tsv(\.gz)?")


def find(folder: pathlib.Path) -> tuple[TsvFile, ...]:
    """Lists a corpus. Raises ValueError: no training text, or a name that is no language's."""
    if not folder.is_dir():
        raise ValueError(f"no input folder {folder}")
    is_flat = not any((folder / split).is_dir() for split in SPLITS)
    found: dict[str | None, list[TsvFile]]
    if is_flat:
        found = {None: _language_files(folder, None)}
    else:
        found = {split: _language_files(folder / split, split) for split in SPLITS}
    if not found[None if is_flat else "train"]:
        where = folder if is_flat else folder / "train"
        raise ValueError(f"no <lang>-en.tsv or <lang>-en.tsv.gz files in {where}")
    return tuple(file for files in found.values() for file in files)


def _language_files(folder: pathlib.Path, split: str | None) -> list[TsvFile]:
    if not folder.is_dir():
        return []
    files: dict[str, TsvFile] = {}
    for path in sorted(folder.iterdir()):
        if not path.name.endswith((".tsv", ".tsv.gz")):
            continue
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: expected a name like de-en.tsv or de-en.tsv.gz")
        code = _code(path, match[1])
        if code in files:
            raise ValueError(f"{path}: language {code} is also in {files[code].path.name}")
        files[code] = TsvFile(path, code, split)
    return list(files.values())


def _code(path: pathlib.Path, tag: str) -> str:
    try:
        return languages.code(tag)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
