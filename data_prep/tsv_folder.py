"""A folder of TSV files, the simplest corpus. It has one of two layouts:

DIR/{train,dev,test}/<lang>-en.tsv[.gz]    split already
DIR/<lang>-en.tsv[.gz]                     the build holds out dev and test
"""

import itertools
import pathlib
import re

from data_prep import languages
from data_prep.sources import TsvFile
from lingvo_gshard.input.manifest import SPLITS

_TSV_NAME = re.compile(r"([A-Za-z0-9_-]+)-en\.tsv(\.gz)?")


def sources_in(path: pathlib.Path, language_codes: str = "standard") -> tuple[TsvFile, ...]:
    """Lists the files of a corpus folder.

    Raises ValueError if there is no training text, or a file's name is not that of a language.
    """
    if not path.is_dir():
        raise ValueError(f"no input folder {path}")
    folders: dict[pathlib.Path, str | None] = {path / split: split for split in SPLITS}
    if not any(folder.is_dir() for folder in folders):
        folders = {path: None}
    train, *others = (
        _language_files(folder, split, language_codes) for folder, split in folders.items()
    )
    if not train:
        raise ValueError(f"no <lang>-en.tsv or <lang>-en.tsv.gz files in {next(iter(folders))}")
    return tuple(itertools.chain(train, *others))


def _language_files(folder: pathlib.Path, split: str | None, language_codes: str) -> list[TsvFile]:
    files: dict[str, TsvFile] = {}
    for path in sorted(folder.glob("*")):
        if not path.name.endswith((".tsv", ".tsv.gz")):
            continue
        match = _TSV_NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: expected a name like de-en.tsv or de-en.tsv.gz")
        try:
            code = languages.named(match[1], language_codes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if code in files:
            raise ValueError(f"{path}: language {code} is also in {files[code].path.name}")
        files[code] = TsvFile(path, code, split)
    return list(files.values())
