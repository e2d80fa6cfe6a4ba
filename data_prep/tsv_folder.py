"""A folder of TSV files, the simplest corpus of pairs: see split_folder.py.

Each `<lang>-en.tsv[.gz]` has the pairs of the language <lang> with English, and each
`<lang>-<lang>.tsv[.gz]` the pairs of two other languages.
"""

import pathlib
import re

from data_prep import characters, languages, split_folder
from data_prep.sources import TsvFile

_TSV_NAME = re.compile(rf"([{characters.NAME}]+)-en\.tsv(\.gz)?")
# Regions have capital letters, so de-CH is not a pair.
_WITHOUT_ENGLISH = re.compile(
    rf"([a-z][{characters.WORD}]*)-([a-z][{characters.WORD}]*)\.tsv(\.gz)?"
)


def sources_in(path: pathlib.Path, language_codes: str = "standard") -> tuple[TsvFile, ...]:
    """Returns a corpus's files as sources.

    Raises ValueError if the folder or its training text is missing, or if a file's name does not
    give a language, or repeats the language of another file in the split.
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
    """Returns the name of a file's pair of languages.

    Raises ValueError if the file's name does not give one.
    """
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
