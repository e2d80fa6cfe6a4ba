"""A folder of TSV files, the simplest corpus of pairs: see split_folder.py.

Each `<lang>-en.tsv[.gz]` holds the pairs of the language <lang>.
"""

import pathlib
import re

from data_prep import languages, split_folder
from data_prep.sources import TsvFile

_TSV_NAME = re.compile(r"([A-Za-z0-9_-]+)-en\.tsv(\.gz)?")


def sources_in(path: pathlib.Path, language_codes: str = "standard") -> tuple[TsvFile, ...]:
    """Returns a corpus's files as sources.

    Raises ValueError if the folder or its training text is missing, or if a file's name is not that
    of a language, or of one that another file of the split has.
    """
    sources: dict[tuple[str | None, str], TsvFile] = {}
    for split, file in split_folder.files_in(path, ".tsv", "<lang>-en"):
        code = _language_of(file, language_codes)
        if (split, code) in sources:
            other = sources[split, code].path.name
            raise ValueError(f"{file}: language {code} is also in {other}")
        sources[split, code] = TsvFile(file, code, split)
    return tuple(sources.values())


def _language_of(file: pathlib.Path, language_codes: str) -> str:
    match = _TSV_NAME.fullmatch(file.name)
    if match is None:
        raise ValueError(f"{file}: expected a name like de-en.tsv or de-en.tsv.gz")
    try:
        return languages.named(match[1], language_codes)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
