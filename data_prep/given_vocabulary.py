"""A vocabulary that is given to a build, which then learns none.

Documents are encoded by the vocabulary of a language model's run.

Both sides of pairs use a vocabulary with tokens of languages. A source begins with its language's
token and a target with its own, as in NLLB-200 and M2M-100. The vocabulary's codes are like
`deu_Latn` or `de`. A language of the data is matched by its standard code; `language_tokens` names
the code where that is ambiguous or different.
"""

import dataclasses
import functools
import pathlib
import types
from collections.abc import Iterable, Mapping, Sequence

import langcodes

from data_prep import languages
from lingvo_gshard.input import fairseq_vocabulary, manifest
from lingvo_gshard.input.bpe_tokenizer import loaded
from lingvo_gshard.input.example_codec import BOS_ID
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.normalization import Normalization
from lingvo_gshard.input.tokenizer import Tokenizer, vocabulary_files
from xla_spmd.files import atomic_file, digests

_PATH = "vocab/shared.model"


@dataclasses.dataclass(frozen=True)
class GivenVocabulary:
    """The vocabulary of documents or of both sides of pairs.

    It has codes for the languages of pairs, which the data may name differently.
    """

    vocabulary: manifest.Vocabulary
    normalization: Normalization
    language_tokens: Mapping[str, str]  # The vocabulary's codes, by the data's languages.

    def check(self, of_data: Iterable[str]) -> None:
        """Raises ValueError, which names all of them, if tokens of languages are missing."""
        problems: list[str] = []
        for language in sorted({*of_data, languages.ENGLISH}):
            try:
                self.code(language)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))

    def code(self, language: str) -> str:
        """Returns the vocabulary's code for a language.

        Raises ValueError if there is not exactly one.
        """
        known = self.vocabulary.languages
        if language in self.language_tokens:
            return self.language_tokens[language]
        if language in known:
            return language

        # A language's own code, with the script if that is named; else any code of the language.
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
            f"language {language}: the vocabulary has no token for it: name one under "
            "[language_tokens], add one by new_languages, or leave the language out"
        )


def file_of(path: str | pathlib.Path, kind: Kind) -> pathlib.Path:
    """Returns the vocabulary's file if `path` is a run, and else the path.

    Raises ValueError if the run has no vocabulary of this kind, or a damaged one of text.
    """
    source, _ = vocabulary_files(path, kind)
    if source.parent.is_dir() and not source.is_file():
        raise ValueError(
            f"{path} has no vocab/{source.name}, as a run for data of kind {kind} has: see --kind"
        )
    file = source if source.is_file() else pathlib.Path(path)
    if kind is Kind.TEXT:
        _check_text(file)
    return file


def read(
    path: str | pathlib.Path,
    data_dir: pathlib.Path,
    new_languages: Sequence[str] = (),
    language_tokens: Mapping[str, str] = types.MappingProxyType({}),
    kind: Kind = Kind.PARALLEL,
) -> GivenVocabulary:
    """Writes the given vocabulary, with new languages, into a data folder, and returns it.

    `path` is a run or its .model; for pairs, also a folder of NLLB's or M2M-100's tokenizer. Raises
    ValueError if it is missing, damaged or of another kind, or if it lacks a language's token that
    `language_tokens` names.
    """
    file = file_of(path, kind)
    if kind is Kind.TEXT:
        model = file.read_bytes()
    elif file.is_dir():
        model = fairseq_vocabulary.read(file, new_languages)
    else:
        Tokenizer(file)  # Raises ValueError if the file is not a vocabulary of ours.
        model = fairseq_vocabulary.added(file.read_bytes(), new_languages)

    (data_dir / _PATH).parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write(data_dir / _PATH, model)
    tokenizer = loaded(data_dir / _PATH)
    for language, code in language_tokens.items():
        if code not in tokenizer.languages:
            raise ValueError(
                f"language_tokens: {language} is {code!r}, but the vocabulary has no such token"
            )
    vocabulary = manifest.Vocabulary(
        digests.describe(data_dir, _PATH), tokenizer.vocab_size, tuple(tokenizer.languages)
    )
    return GivenVocabulary(vocabulary, tokenizer.normalization, language_tokens)


def _check_text(file: pathlib.Path) -> None:
    """Raises ValueError unless a file is the vocabulary of a language model."""
    if file.is_dir():
        raise ValueError(
            f"{file} has no vocab/text.model: expected a run of a language model, such as gshard "
            "import writes for a model with a tokenizer, or that file"
        )
    tokenizer = loaded(file)
    if tokenizer.languages:
        raise ValueError(f"{file} has tokens of languages, and so is a vocabulary of pairs")

    beginning = tokenizer.prompt("")
    if beginning not in ([], [BOS_ID]):
        pieces = " ".join(tokenizer.pieces(beginning))
        raise ValueError(f"{file} adds {pieces} to a text; expected the model's BOS or nothing")


@functools.lru_cache(maxsize=1)
def _by_code(codes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns a vocabulary's codes by their standard codes, with and without a script."""
    by_code: dict[str, tuple[str, ...]] = {}
    for code in codes:
        if languages.is_valid(code):
            for standard in {languages.code(code), _macrolanguage(code)}:
                by_code[standard] = (*by_code.get(standard, ()), code)
    return by_code


@functools.cache
def _macrolanguage(tag: str) -> str:
    """Returns a tag's language without script and region; its macrolanguage, if any, such as ar."""
    if not languages.is_valid(tag):
        return tag
    return str(langcodes.Language.get(langcodes.standardize_tag(tag, macro=True)).language)
