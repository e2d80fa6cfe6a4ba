"""The configuration of a build: a TOML file of sources and settings; see docs/data.md."""

import dataclasses
import itertools
import math
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from data_prep import checks, directions, given_vocabulary, languages, source_tables, split_folder
from data_prep.sources import Source
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import storage

MODEL_TYPES = ("bpe", "unigram")
_MIN_VOCAB_SIZE = 4 + 256 + 1  # The special ids, a piece for each byte, and one character.
# Settings that need a given vocabulary, and settings for learning one.
_OF_A_VOCABULARY = ("new_languages", "language_tokens")
_OF_LEARNING = (
    "source_vocab_size",
    "target_vocab_size",
    "text_vocab_size",
    "model_type",
    "character_coverage",
    "max_vocab_sentences",
    "vocab_temperature",
    "seed",
)


def _number(default: float, least: float, most: float = math.inf, kind: Kind | None = None) -> Any:
    """Returns a field for a setting from `least` to `most`; with `kind`, only for such data."""
    return dataclasses.field(default=default, metadata={"range": (least, most), "kind": kind})


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """The settings of a build. Lengths in pieces include EOS."""

    kind: str = Kind.PARALLEL.value  # The kind of data: parallel or text.
    source_vocab_size: int = _number(8000, _MIN_VOCAB_SIZE, kind=Kind.PARALLEL)  # In pieces.
    target_vocab_size: int = _number(4000, _MIN_VOCAB_SIZE, kind=Kind.PARALLEL)
    text_vocab_size: int = _number(8000, _MIN_VOCAB_SIZE, kind=Kind.TEXT)
    # A run, or the .model of one; for pairs, also a folder of NLLB's or M2M-100's tokenizer.
    # If set, no vocabularies are learned: see given_vocabulary.py.
    vocabulary: str = ""
    # Language tokens to add to the given vocabulary, such as nds_Latn.
    new_languages: tuple[str, ...] = dataclasses.field(default=(), metadata={"kind": Kind.PARALLEL})
    # The given vocabulary's codes by the data's languages, where standard codes are ambiguous:
    # sr = "srp_Cyrl".
    language_tokens: Mapping[str, str] = dataclasses.field(
        default_factory=dict, metadata={"kind": Kind.PARALLEL}
    )
    model_type: str = "bpe"  # SentencePiece's algorithm.
    # many_to_english, english_to_many or many_to_many: see directions.py.
    directions: str = dataclasses.field(default="many_to_english", metadata={"kind": Kind.PARALLEL})
    # The share of the characters that get pieces; others are written as bytes. For three languages
    # in Han among 71, 0.9995 makes 8 to 17 % of the pieces bytes, and 0.9999 only 1 to 5 %. In
    # return, the other languages' sentences become 0.2 % longer with 64000 pieces, 4 % with 8000.
    character_coverage: float = _number(0.9999, 0.98, 1)
    # The most sentences from which the vocabularies learn.
    max_vocab_sentences: int = _number(300_000, 1)
    # T: languages share these sentences in proportion to n**(1/T).
    vocab_temperature: float = _number(5.0, 1)
    max_pieces: int = _number(128, 1, kind=Kind.PARALLEL)  # Longer training pairs are dropped.
    # The most of a file's lines that may be malformed; more is an error.
    max_malformed_share: float = _number(0.01, 0, 1)
    # Dev's share, and test's share, of a corpus without splits.
    held_out_share: float = _number(0.01, 0, 0.5)
    max_chars: int = _number(1000, 1, kind=Kind.PARALLEL)  # For the longer side of training pairs.
    # The most by which the sides' lengths in characters may differ, as a factor.
    max_length_ratio: float = _number(5.0, 1, kind=Kind.PARALLEL)
    # Whether to replace HTML entities, and a tokenizer's marks, such as @-@, by text.
    unescape: bool = False
    check_language: bool = False  # Whether to drop sentences that are surely in another language.
    # ISO 15924 codes by language, where the text itself should not decide.
    scripts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # Pairs or documents per chunk; a process has the digests of one chunk in memory.
    pairs_per_chunk: int = _number(32_768, 1)
    # The most examples in a file of records, unless a single chunk has more. Writing one takes 200
    # bytes of memory for each example.
    pairs_per_shard: int = _number(32_768, 1)
    seed: int = _number(1, 0, 2**64 - 1)  # Decides which sentences the vocabularies learn from.

    def __post_init__(self) -> None:
        checks.field_types(self)
        for field in dataclasses.fields(self):
            if "range" in field.metadata:
                least, most = field.metadata["range"]
                checks.in_range(field.name, getattr(self, field.name), least, most)
        checks.one_of("kind", self.kind, tuple(Kind))
        checks.one_of("model_type", self.model_type, MODEL_TYPES)
        checks.one_of("directions", self.directions, tuple(directions.SETTINGS))

        # A setting without an effect must not be given.
        for name in self._of_other_kinds():
            if self._is_given(name):
                raise ValueError(f"{name} is not a setting for data of kind {self.kind}")
        without = _OF_LEARNING if self.vocabulary else _OF_A_VOCABULARY
        for name in without:
            if self._is_given(name):
                whose = "with" if self.vocabulary else "without"
                raise ValueError(f"{name} is not a setting for a build {whose} a given vocabulary")

    def settings(self) -> dict[str, Any]:
        """Returns the settings for data of this kind, by name."""
        settings = dataclasses.asdict(self)
        for name in self._of_other_kinds():
            del settings[name]

        # Older plans and manifests lack it.
        if not self.unescape:
            del settings["unescape"]

        # Plans and manifests must equal older ones: pairs come from a time without other kinds,
        # and builds without a given vocabulary from a time when it could not be given.
        if self.kind == Kind.PARALLEL:
            del settings["kind"]
        for name in ("vocabulary", *_OF_A_VOCABULARY):
            if not self.vocabulary:
                settings.pop(name, None)
        return settings

    @property
    def vocabulary_files(self) -> tuple[pathlib.Path, ...]:
        """The files of a given vocabulary."""
        if not self.vocabulary:
            return ()
        path = given_vocabulary.file_of(self.vocabulary, Kind(self.kind))
        return tuple(sorted(path.iterdir())) if path.is_dir() else (path,)

    def _is_given(self, name: str) -> bool:
        """Returns whether a setting differs from its default."""
        field = type(self).__dataclass_fields__[name]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        return bool(getattr(self, name) != default)

    def _of_other_kinds(self) -> list[str]:
        """Returns the names of the settings that do not apply to data of this kind."""
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
    TOML, has an unknown key or a bad value, or names a file that is missing or was named before.
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such file")
    if path.is_dir():
        raise ValueError(f"{path}: this is a folder; expected a TOML file")

    # Any mistake in the file, also a value's type, is reported with the file's name.
    try:
        fields = _with_homes(tomllib.loads(path.read_text(encoding="utf-8-sig")))
        if "vocabulary" in fields:
            fields["vocabulary"] = str((folder or path.parent) / fields["vocabulary"])
        fields |= settings
        tables = fields.pop("sources", [])
        if not isinstance(tables, list):
            raise ValueError("sources: expected tables, each under [[sources]]")

        # The remaining fields are the settings of the build.
        names_corpora = fields.get("kind") == Kind.TEXT
        fields["scripts"] = _scripts(fields.get("scripts", {}), tables, names_corpora)
        if "new_languages" in fields:
            fields["new_languages"] = _strings("new_languages", fields["new_languages"])
        if "language_tokens" in fields:
            _strings("language_tokens", list(fields["language_tokens"].values()))
        config = checks.call(BuildConfig, "the file", fields)

        sources: list[Source] = []
        for table in tables:
            sources += source_tables.of_table(table, folder or path.parent, Kind(config.kind))
        source_tables.check_distinct(sources)
        for table in tables:
            if table["format"] == "folder":
                warn_of_unread((folder or path.parent) / table["path"], sources)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error

    if not sources:
        raise ValueError(f"{path} has no [[sources]]: expected one or more")
    return tuple(sources), config


def sources_of_folder(folder: pathlib.Path, kind: Kind) -> Sequence[Source]:
    """Returns the sources in a folder of text, the simplest corpus; warns about unused files."""
    sources = source_tables.FOLDERS[kind](folder)
    warn_of_unread(folder, sources)
    return sources


def warn_of_unread(folder: pathlib.Path, sources: Sequence[Source]) -> None:
    """Warns about files in a folder of text that none of the sources reads."""
    files = itertools.chain.from_iterable(source.files for source in sources)
    split_folder.warn_of_unread(folder, list(files))


def _scripts(
    codes_by_tag: Mapping[str, Any], tables: Sequence[Any], names_corpora: bool
) -> dict[str, tuple[str, ...]]:
    """Returns the setting `scripts`, with the names that sources give to languages or corpora."""
    kinds_of_codes = {table.get("language_codes") for table in tables if isinstance(table, dict)}
    codes = "source" if names_corpora or "source" in kinds_of_codes else "standard"

    scripts: dict[str, tuple[str, ...]] = {}
    for tag, script_codes in codes_by_tag.items():
        # A language that is named by a source keeps its name.
        language = tag if codes == "source" else languages.code(tag)
        scripts[language] = languages.checked_scripts(script_codes)
    return scripts


def _strings(name: str, values: Any) -> tuple[str, ...]:
    """Returns a list's strings as a tuple. Raises ValueError if it is not a list of strings."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} {values!r}: expected tokens of languages, such as nds_Latn")
    return tuple(values)


def _with_homes(value: Any) -> Any:
    """Returns a file's values; a `~/` at the beginning of a text becomes the home folder."""
    if isinstance(value, dict):
        return {name: _with_homes(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_homes(item) for item in value]
    is_path = isinstance(value, str) and value.startswith("~/")
    return storage.expanded(value) if is_path else value
