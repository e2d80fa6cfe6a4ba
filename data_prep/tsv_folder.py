"""A folder of TSV files, the simplest corpus of pairs: see split_folder.py.

Each `<lang>-en.tsv[.gz]` holds the pairs of the language <lang>, and `<lang>-<lang>.tsv[.gz]` those
of two languages without English.
"""

import pathlib
import re

from data_prep import languages, split_folder
from data_prep.sources import TsvFile

_TSV_NAME = re.compile(r"([A-Za-z0-9_-]+)-en\.tsv(\.gz)?")
# Regions have capital letters, so de-CH is no pair.
_WITHOUT_ENGLISH = re.compile(r"([a-z]\w*)-([a-z]\w*)\.tsv(\.gz)?")


def sources_in(path: pathlib.Path, language_codes: str = "standard") -> tuple[TsvFile, ...]:
    """Returns a corpus's files as sources.

    Raises ValueError if the folder or its training text is missing, or if a file's name is not that
    of a language, or of one that another file of the split has.
    """
    sources: dict[tuple[str | None, str], TsvFile] = {}
    for split, file in split_folder.files_in(path, ".tsv", "<lang>-en"):
        pair = _pair_of(file, language_codes)
        key = (split, languages.in_order(pair))
        if key in sources:
            other = sources[key].path.name
            raise ValueError(f"{file}: {_noun(pair)} {pair} is also in {other}")
        sources[key] = TsvFile(file, pair, split)
    return tuple(sources.values())


def _noun(pair: str) -> str:
    return "pair" if languages.is_without_english(pair) else "language"


def _pair_of(file: pathlib.Path, language_codes: str) -> str:
    """Returns the name of a file's pair of languages; ValueError if the file's name has none."""
    try:
        match = _TSV_NAME.fullmatch(file.name)
        if match is not None:
            return languages.named(match[1], language_codes)

        match = _WITHOUT_ENGLISH.fullmatch(file.name)
        if match is None or languages.is_english(match[1]):
            raise ValueError(
                "expected a name like de-en.tsv or de-en.tsv.gz, or de-fr.tsv without English"
            )
        source, other = (languages.named(name, language_codes) for name in match.groups()[:2])
        return languages.paired(source, other)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
