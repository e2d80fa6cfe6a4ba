"""A folder of TSV files, the simplest corpus.

It has one of two layouts:

DIR/{train,dev,test}/<lang>-en.tsv[.gz]    split already
DIR/<lang>-en.tsv[.gz]                     the build holds out dev and test
"""

import pathlib
import re

from data_prep import languages
from data_prep.sources import TsvFile
from lingvo_gshard.input.manifest import SPLITS

_TSV_NAME = re.compile(r"([A-Za-z0-9_-]+)-en\.tsv(\.gz)?")


def sources_in(path: pathlib.Path, language_codes: str = "standard") -> tuple[TsvFile, ...]:
    """Returns a corpus's files as sources.

    Raises ValueError if the folder or its training text is missing, or if a file's name is not that
    of a language, or of one that another file of the split has.
    """
    if not path.is_dir():
        raise ValueError(f"no input folder {path}")
    # Split already, or to be split.
    folders: dict[str | None, pathlib.Path] = {split: path / split for split in SPLITS}
    if not any(folder.is_dir() for folder in folders.values()):
        folders = {None: path}

    sources: dict[tuple[str | None, str], TsvFile] = {}
    for split, folder in folders.items():
        for file in sorted([*folder.glob("*.tsv"), *folder.glob("*.tsv.gz")]):
            code = _language_of(file, language_codes)
            if (split, code) in sources:
                other = sources[split, code].path.name
                raise ValueError(f"{file}: language {code} is also in {other}")
            sources[split, code] = TsvFile(file, code, split)

        if not sources:  # The first folder is that of training text.
            raise ValueError(f"no <lang>-en.tsv or <lang>-en.tsv.gz files in {folder}")
    return tuple(sources.values())


def _language_of(file: pathlib.Path, language_codes: str) -> str:
    match = _TSV_NAME.fullmatch(file.name)
    if match is None:
        raise ValueError(f"{file}: expected a name like de-en.tsv or de-en.tsv.gz")
    try:
        return languages.named(match[1], language_codes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
