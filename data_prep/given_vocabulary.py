"""A vocabulary that a build is given, with tokens of languages, instead of learning its own.

Both sides have it. A source begins with the token of its language and a target with its own, as in
NLLB-200 and M2M-100. Their codes are `deu_Latn` or `de`; a language of the data is matched by its
standard code, and `language_tokens` names what is ambiguous or has another name there.
"""

import dataclasses
import functools
import pathlib
import types
from collections.abc import Iterable, Mapping, Sequence

import langcodes

from data_prep import languages
from lingvo_gshard.files import atomic_file, digests
from lingvo_gshard.input import fairseq_vocabulary, manifest
from lingvo_gshard.input.normalization import Normalization
from lingvo_gshard.input.tokenizer import Tokenizer

_PATH = "vocab/shared.model"


@dataclasses.dataclass(frozen=True)
class GivenVocabulary:
    """The vocabulary of both sides, and the languages that it names otherwise than the data."""

    vocabulary: manifest.Vocabulary
    normalization: Normalization
    language_tokens: Mapping[str, str]  # Codes by the data's languages.

    def check(self, of_data: Iterable[str]) -> None:
        """Raises ValueError, which names them all, if it lacks the token of a language."""
        problems: list[str] = []
        for language in sorted({*of_data, languages.ENGLISH}):
            try:
                self.code(language)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))

    def code(self, language: str) -> str:
        """Returns the vocabulary's code of a language; ValueError if it has none, or several."""
        known = self.vocabulary.languages
        if language in self.language_tokens:
            return self.language_tokens[language]
        if language in known:
            return language

        # Its own code, with the script if one is named; else any of the language.
        by_code = _by_code(known)
        codes = by_code.get(language) or by_code.get(_macrolanguage(language)) or ()
        if len(codes) == 1:
            return codes[0]
        if codes:
            raise ValueError(
                f"language {language} may be {' or '.join(codes)} in the vocabulary: name one "
                "under [language_tokens]"
            )
        raise ValueError(
            f"language {language}: the vocabulary has no token of it: name one under "
            "[language_tokens], add one by new_languages, or leave the language out"
        )


def read(
    path: str | pathlib.Path,
    data_dir: pathlib.Path,
    new_languages: Sequence[str] = (),
    language_tokens: Mapping[str, str] = types.MappingProxyType({}),
) -> GivenVocabulary:
    """Writes the vocabulary that a build is given, with new languages, into a data folder.

    `path` is a folder of NLLB's or M2M-100's tokenizer, or a .model that was made from one. Raises
    ValueError if it is missing or damaged, or has no tokens of languages, or of those that
    `language_tokens` names.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        model = fairseq_vocabulary.read(path, new_languages)
    else:
        Tokenizer(path)  # Raises ValueError for a file that is none of ours.
        model = fairseq_vocabulary.added(path.read_bytes(), new_languages)

    (data_dir / _PATH).parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(data_dir / _PATH, model)
    tokenizer = Tokenizer(data_dir / _PATH)
    for language, code in language_tokens.items():
        if code not in tokenizer.languages:
            raise ValueError(
                f"language_tokens: {language} is {code!r}, of which the vocabulary has no token"
            )
    vocabulary = manifest.Vocabulary(
        digests.describe(data_dir, _PATH), tokenizer.vocab_size, tuple(tokenizer.languages)
    )
    return GivenVocabulary(vocabulary, tokenizer.normalization, language_tokens)


@functools.lru_cache(maxsize=1)
def _by_code(codes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns a vocabulary's codes by their standard ones, and by those without a script."""
    by_code: dict[str, tuple[str, ...]] = {}
    for code in codes:
        if languages.is_valid(code):
            for standard in {languages.code(code), _macrolanguage(code)}:
                by_code[standard] = (*by_code.get(standard, ()), code)
    return by_code


@functools.cache
def _macrolanguage(tag: str) -> str:
    """Returns a tag's language without script and region, and the macrolanguage of some: ar."""
    if not languages.is_valid(tag):
        return tag
    return str(langcodes.Language.get(langcodes.standardize_tag(tag, macro=True)).language)
