"""The configuration of a build: a TOML file of sources and settings, as docs/data.md shows."""

import collections
import dataclasses
import glob
import inspect
import itertools
import math
import os
import pathlib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from data_prep import directions, languages, patterns, split_folder, text_folder, tsv_folder
from data_prep.documents import (
    DOCUMENTS,
    SIDES,
    JsonlDocuments,
    OneSide,
    ParquetDocuments,
    TextFile,
    TfdsDocuments,
)
from data_prep.multilingual import TfdsSplit, TmxFile
from data_prep.parquet import ParquetFile
from data_prep.sources import ColumnsFile, JsonlFile, MosesFiles, PoFile, Source, TsvFile
from lingvo_gshard.input.manifest import SPLITS, Kind

MODEL_TYPES = ("bpe", "unigram")
# The formats of each kind of data; of pairs, text takes one side, too.
_FORMATS: dict[Kind, dict[str, type[Source]]] = {
    Kind.PARALLEL: {
        "tsv": TsvFile,
        "tmx": TmxFile,
        "jsonl": JsonlFile,
        "po": PoFile,
        "moses": MosesFiles,
        "columns": ColumnsFile,
        "parquet": ParquetFile,
        "tfds": TfdsSplit,
    },
    Kind.TEXT: {
        "text": TextFile,
        "jsonl": JsonlDocuments,
        "parquet": ParquetDocuments,
        "tfds": TfdsDocuments,
    },
}
FOLDERS: dict[Kind, Callable[..., Sequence[Source]]] = {
    Kind.PARALLEL: tsv_folder.sources_in,
    Kind.TEXT: text_folder.sources_in,
}
# Two sources with the same text may differ in these fields, which choose from it.
_CHOICES = (
    "language",
    "languages",
    "language_codes",
    "target_language",
    "score_column",
    "min_score",
    "corpus",
)
_PLAIN_TYPES = {bool, int, float, str, types.NoneType}
_MIN_VOCAB_SIZE = 4 + 256 + 1  # The special ids, a piece for each byte, and one character.
# Settings of a vocabulary that is given, and of those that are learned.
_OF_A_VOCABULARY = ("new_languages", "language_tokens")
_OF_LEARNING = (
    "source_vocab_size",
    "target_vocab_size",
    "model_type",
    "character_coverage",
    "max_vocab_sentences",
    "vocab_temperature",
)
_Result = TypeVar("_Result")


def _number(default: float, least: float, most: float = math.inf, kind: Kind | None = None) -> Any:
    """Returns a field for a setting from `least` to `most`, of one kind of data alone if given."""
    return dataclasses.field(default=default, metadata={"range": (least, most), "kind": kind})


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """The settings of a build. Lengths in pieces include EOS."""

    kind: str = Kind.PARALLEL.value  # Or text.
    source_vocab_size: int = _number(8000, _MIN_VOCAB_SIZE, kind=Kind.PARALLEL)  # In pieces.
    target_vocab_size: int = _number(4000, _MIN_VOCAB_SIZE, kind=Kind.PARALLEL)
    text_vocab_size: int = _number(8000, _MIN_VOCAB_SIZE, kind=Kind.TEXT)
    # A folder of NLLB's or M2M-100's tokenizer, or the .model of a run that was imported from one,
    # instead of vocabularies that are learned: see given_vocabulary.py.
    vocabulary: str = dataclasses.field(default="", metadata={"kind": Kind.PARALLEL})
    # Tokens that it gets, such as nds_Latn.
    new_languages: tuple[str, ...] = ()
    # Its codes of languages by the data's, where the standard codes do not tell: sr = "srp_Cyrl".
    language_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    model_type: str = "bpe"  # SentencePiece's algorithm.
    # Or english_to_many or many_to_many: see directions.py.
    directions: str = dataclasses.field(default="many_to_english", metadata={"kind": Kind.PARALLEL})
    # The share of the characters that get pieces; others are written as bytes. For three languages
    # in Han among 71, 0.9995 makes 8 to 17 % of the pieces bytes, and 0.9999 only 1 to 5 %; the
    # other languages' sentences become 0.2 % longer with 64000 pieces, and 4 % with 8000.
    character_coverage: float = _number(0.9999, 0.98, 1)
    max_vocab_sentences: int = _number(300_000, 1)  # From which the vocabularies learn.
    vocab_temperature: float = _number(5.0, 1)  # T: languages share them in proportion to n**(1/T).
    max_pieces: int = _number(128, 1, kind=Kind.PARALLEL)  # Longer training pairs are dropped.
    max_malformed_share: float = _number(0.01, 0, 1)  # Of a file's lines; more is an error.
    held_out_share: float = _number(0.01, 0, 0.5)  # Each of dev's and test's, if there is no split.
    max_chars: int = _number(1000, 1, kind=Kind.PARALLEL)  # Of a training pair's longer side.
    # Between the sides' lengths in characters.
    max_length_ratio: float = _number(5.0, 1, kind=Kind.PARALLEL)
    # Whether to make text of HTML entities, and of the marks of a tokenizer, such as @-@.
    unescape: bool = False
    check_language: bool = False  # Whether to drop sentences that are surely in another language.
    # ISO 15924 codes by language, if its text should not decide.
    scripts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # Pairs or documents; a process holds the digests of one chunk in memory.
    pairs_per_chunk: int = _number(32_768, 1)
    # The most in a file of records, if no chunk has more. Its writer takes 200 bytes for each.
    pairs_per_shard: int = _number(32_768, 1)
    seed: int = _number(1, 0, 2**64 - 1)  # Decides which sentences the vocabularies learn from.

    def __post_init__(self) -> None:
        _check_types(self)
        for field in dataclasses.fields(self):
            if "range" in field.metadata:
                least, most = field.metadata["range"]
                _check_range(field.name, getattr(self, field.name), least, most)
        _check_one_of("kind", self.kind, tuple(Kind))
        _check_one_of("model_type", self.model_type, MODEL_TYPES)
        _check_one_of("directions", self.directions, tuple(directions.SETTINGS))

        # A limit that would not hold must not be given.
        for name in self._of_other_kinds():
            if self._is_given(name):
                raise ValueError(f"{name} is no setting of data of kind {self.kind}")
        without = _OF_LEARNING if self.vocabulary else _OF_A_VOCABULARY
        for name in without:
            if self._is_given(name):
                whose = "that has" if self.vocabulary else "without"
                raise ValueError(f"{name} is no setting of a build {whose} a vocabulary")

    def settings(self) -> dict[str, Any]:
        """Returns the settings that data of this kind has, by name."""
        settings = dataclasses.asdict(self)
        for name in self._of_other_kinds():
            del settings[name]

        # Older plans and manifests do not have it.
        if not self.unescape:
            del settings["unescape"]

        # Builds of pairs have the plans and manifests from before there were other kinds, and those
        # without a given vocabulary have those from before one could be given.
        if self.kind == Kind.PARALLEL:
            del settings["kind"]
        for name in ("vocabulary", *_OF_A_VOCABULARY):
            if not self.vocabulary:
                settings.pop(name, None)
        return settings

    @property
    def vocabulary_files(self) -> tuple[pathlib.Path, ...]:
        """The files that a given vocabulary is read from."""
        if not self.vocabulary:
            return ()
        path = pathlib.Path(self.vocabulary)
        return tuple(sorted(path.iterdir())) if path.is_dir() else (path,)

    def _is_given(self, name: str) -> bool:
        """Returns whether a setting has another value than by default."""
        field = type(self).__dataclass_fields__[name]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        return bool(getattr(self, name) != default)

    def _of_other_kinds(self) -> list[str]:
        """Returns the names of the settings that data of this kind does not have."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if field.metadata.get("kind") not in (None, self.kind)
        ]


def load(
    path: pathlib.Path, settings: Mapping[str, Any], folder: pathlib.Path | None = None
) -> tuple[tuple[Source, ...], BuildConfig]:
    """Reads a configuration file; `settings` override it.

    Its paths are relative to `folder`, by default the file's. Raises ValueError if the file is not
    TOML, has an unknown key or a bad value, or names a file that is missing or named before.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such file")

    # Whatever is wrong in the file, also with a value's type, is told with the file's name.
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if "vocabulary" in fields:
            fields["vocabulary"] = str((folder or path.parent) / fields["vocabulary"])
        fields |= settings
        tables = fields.pop("sources", [])
        if not isinstance(tables, list):
            raise ValueError("sources: expected tables, each under [[sources]]")

        # What is left beside the sources are the settings of the build.
        names_corpora = fields.get("kind") == Kind.TEXT
        fields["scripts"] = _scripts(fields.get("scripts", {}), tables, names_corpora)
        if "new_languages" in fields:
            fields["new_languages"] = _strings("new_languages", fields["new_languages"])
        if "language_tokens" in fields:
            _strings("language_tokens", list(fields["language_tokens"].values()))
        config = _call(BuildConfig, "the file", fields)

        sources: list[Source] = []
        for table in tables:
            sources += _sources(table, folder or path.parent, Kind(config.kind))
        _check_distinct(sources)
        for table in tables:
            if table["format"] == "folder":
                warn_of_unread((folder or path.parent) / table["path"], sources)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error

    if not sources:
        raise ValueError(f"{path} has no [[sources]]: expected one or more")
    return tuple(sources), config


def sources_of_folder(folder: pathlib.Path, kind: Kind) -> Sequence[Source]:
    """Returns the sources in a folder of text, the simplest corpus; warns of what it leaves out."""
    sources = FOLDERS[kind](folder)
    warn_of_unread(folder, sources)
    return sources


def warn_of_unread(folder: pathlib.Path, sources: Sequence[Source]) -> None:
    """Names what is in a folder of text that none of the sources reads."""
    files = itertools.chain.from_iterable(source.files for source in sources)
    split_folder.warn_of_unread(folder, list(files))


def _scripts(
    codes_by_tag: Mapping[str, Any], tables: Sequence[Any], names_corpora: bool
) -> dict[str, tuple[str, ...]]:
    """Returns the file's setting `scripts`, with languages or corpora as its sources name them."""
    kinds_of_codes = {table.get("language_codes") for table in tables if isinstance(table, dict)}
    codes = "source" if names_corpora or "source" in kinds_of_codes else "standard"

    scripts: dict[str, tuple[str, ...]] = {}
    for tag, script_codes in codes_by_tag.items():
        # A source's own name for a language stays as it is.
        language = tag if codes == "source" else languages.code(tag)
        scripts[language] = languages.checked_scripts(script_codes)
    return scripts


@dataclasses.dataclass(frozen=True)
class _Claim:
    """The text that a source reads, and the languages that it takes from it; None is all."""

    text: tuple[Any, ...]
    languages: frozenset[str] | None

    @classmethod
    def of(cls, source: Source) -> "_Claim":
        """Returns a source's claim. Its text is every field but those that choose from it."""
        if isinstance(source, OneSide):
            of_pairs = cls.of(source.pairs)
            return cls((source.side, *of_pairs.text), of_pairs.languages)

        text: list[Any] = [type(source)]
        for name, value in vars(source).items():
            if name not in _CHOICES:
                # Two spellings of a path are one file.
                text.append(value.resolve() if isinstance(value, pathlib.Path) else value)

        # A source of one language has `language`, one of several may have `languages`.
        taken = getattr(source, "languages", None)
        if hasattr(source, "language"):
            taken = [source.language]
        return cls(tuple(text), frozenset(taken) if taken else None)

    def overlaps(self, other: "_Claim") -> bool:
        """Returns whether two claims on the same text share a language."""
        if self.languages is None or other.languages is None:
            return True
        return not self.languages.isdisjoint(other.languages)


def _check_distinct(sources: Sequence[Source]) -> None:
    """Raises ValueError if two sources read the same text for one language and split."""
    claims: dict[Any, list[_Claim]] = collections.defaultdict(list)  # By their text.
    for source in sources:
        claim = _Claim.of(source)
        if any(claim.overlaps(earlier) for earlier in claims[claim.text]):
            raise ValueError(f"sources: {source} is given twice for the same language and split")
        claims[claim.text].append(claim)


def _sources(table: Mapping[str, Any], folder: pathlib.Path, kind: Kind) -> list[Source]:
    """Returns the sources of a table for a kind of data; its paths are relative to `folder`."""
    tables: Sequence[Mapping[str, Any]] = [table]
    if any("{" in str(table.get(field)) for field in ("path", "source")):
        tables = patterns.expand(table, folder)

    sources: list[Source] = []
    for filled_in in tables:
        if kind is Kind.TEXT and "side" in filled_in:
            sources += _one_sides(filled_in, folder)
        else:
            sources += _sources_without_placeholders(filled_in, folder, kind)
    return sources


def _one_sides(table: Mapping[str, Any], folder: pathlib.Path) -> list[Source]:
    """Returns the sources of a table that takes one side of pairs."""
    fields = dict(table)
    side = fields.pop("side")
    _check_one_of("sources: side", side, SIDES)
    corpus = fields.pop("corpus", None)
    if corpus is not None:
        _check_corpus(corpus)

    sources: list[Source] = []
    for pairs in _sources_without_placeholders(fields, folder, Kind.PARALLEL):
        sources.append(OneSide(pairs, side, corpus, pairs.split))
    return sources


def _check_corpus(corpus: Any) -> None:
    """Raises ValueError unless this names a corpus."""
    # Names are parts of the names of files.
    if not isinstance(corpus, str) or not re.fullmatch(r"[\w-]+", corpus):
        raise ValueError(f"sources: corpus {corpus!r}: expected letters, digits, - and _")


def _sources_without_placeholders(
    table: Mapping[str, Any], folder: pathlib.Path, kind: Kind
) -> Sequence[Source]:
    fields = dict(table)
    format_name = fields.pop("format", None)
    _check_format(format_name, kind)
    language_codes = fields.get("language_codes", "standard")
    _check_one_of("sources: language_codes", language_codes, languages.NAMES)

    # A folder's files name their languages and splits.
    if format_name == "folder":
        if "path" in fields:
            fields["path"] = folder / fields["path"]
        return _call(FOLDERS[kind], "a folder", fields)

    # All other formats have these fields in common.
    _set_split(fields)
    if "corpus" in fields:
        _check_corpus(fields["corpus"])
    if "document" in fields:
        _check_one_of("sources: document", fields["document"], DOCUMENTS)
    _name_languages(fields, language_codes)
    if "language" in fields:
        # `languages` only says whether it is wanted, as beside a placeholder.
        wanted = fields.pop("languages", None)
        fields.pop("language_codes", None)
        target = fields.pop("target_language", languages.ENGLISH)
        if wanted is not None and not {fields["language"], target} <= {*wanted, languages.ENGLISH}:
            return []
        fields["language"] = languages.paired(fields["language"], target)

    # These name their files one by one, or not at all.
    source_type = _FORMATS[kind][format_name]
    if format_name in ("moses", "tfds"):
        for name in ("source", "english", "data_dir"):
            if name in fields:
                fields[name] = folder / fields[name]
        return [_call(source_type, format_name, fields)]

    files = _matching_files(folder, fields.get("path", ""))
    if not files:
        raise ValueError(f"sources: no file in {folder} matches path {fields.get('path')!r}")
    return [_call(source_type, format_name, fields | {"path": file}) for file in files]


def _name_languages(fields: dict[str, Any], codes: str) -> None:
    """Replaces the languages of a table by their standard codes, or checks the names of others."""
    for name in ("language", "target_language"):
        if name in fields:
            fields[name] = languages.named(fields[name], codes)
    if "languages" in fields:
        fields["languages"] = tuple(languages.named(tag, codes) for tag in fields["languages"])


def _check_format(name: Any, kind: Kind) -> None:
    """Raises ValueError unless this kind of data has a format of this name."""
    expected = ("folder", *_FORMATS[kind])
    if kind is Kind.TEXT and name not in expected and name in _FORMATS[Kind.PARALLEL]:
        raise ValueError(
            f"sources: format {name!r} has pairs: text takes one side of them, such as "
            f"side = {SIDES[-1]!r}"
        )
    _check_one_of("sources: format", name, expected)


def _matching_files(folder: pathlib.Path, pattern: Any) -> list[pathlib.Path]:
    """Returns the files in `folder` that match a pattern, sorted; or the one of that very name."""
    if os.path.isfile(folder / str(pattern)):
        return [folder / str(pattern)]
    whole_pattern = pathlib.Path(glob.escape(str(folder)), str(pattern))  # Or an absolute pattern.
    paths = sorted(glob.glob(str(whole_pattern), recursive=True))
    return [pathlib.Path(path) for path in paths if os.path.isfile(path)]


def _set_split(fields: dict[str, Any]) -> None:
    """Checks a table's split, or replaces `text_split` by it."""
    text_split = fields.pop("text_split", None)
    if text_split is None:
        _check_one_of("sources: split", fields.get("split", "train"), SPLITS)
        return

    if text_split in SPLITS or not re.fullmatch("[a-z0-9_]+", text_split):
        expected = f"small letters, digits and _, and none of {', '.join(SPLITS)}"
        raise ValueError(f"sources: text_split {text_split!r}: expected {expected}")
    fields["split"] = text_split


def _call(function: Callable[..., _Result], owner: str, fields: Mapping[str, Any]) -> _Result:
    """Calls a function with a table's fields. Raises ValueError if one is missing or unknown."""
    # A format's settings are the arguments of its class, so each is named in one place.
    parameters = inspect.signature(function).parameters
    unknown = sorted(fields.keys() - parameters)
    if unknown:
        known = ", ".join(sorted(parameters))
        raise ValueError(f"{owner} has no setting {', '.join(unknown)}, only {known}")

    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in fields
    ]
    if missing:
        raise ValueError(f"{owner} needs {', '.join(missing)}")

    result = function(**fields)
    if dataclasses.is_dataclass(result):
        _check_types(result)
    return result


def _strings(name: str, values: Any) -> tuple[str, ...]:
    """Returns a list's strings as a tuple; ValueError if it is none, or holds anything else."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} {values!r}: expected tokens of languages, such as nds_Latn")
    return tuple(values)


def _check_types(instance: Any) -> None:
    """Raises ValueError unless each field that has a plain type, or None, has a value of it."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        kinds: tuple[Any, ...] = (field.type,)
        if isinstance(field.type, types.UnionType):
            kinds = typing.get_args(field.type)
        if float in kinds and type(value) is int:  # TOML's 1 where 1.0 is meant.
            continue
        if set(kinds) <= _PLAIN_TYPES and type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
            raise ValueError(f"{field.name} {value!r}: expected a value of type {expected}")


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise ValueError(f"{name} {value!r}: expected {expected}")


def _check_one_of(name: str, value: Any, expected: Sequence[str]) -> None:
    if value not in expected:
        raise ValueError(f"{name} {value!r}: expected one of {', '.join(expected)}")
