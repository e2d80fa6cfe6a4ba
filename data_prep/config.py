"""What a prepared folder is made from and with: a small TOML file.

    source_vocab_size = 64000
    target_vocab_size = 32000

    [scripts]                         # only where a language's text should not decide
    sr = ["Cyrl", "Latn"]

    [[sources]]
    format = "folder"                 # {train,dev,test}/<lang>-en.tsv[.gz], or <lang>-en.tsv[.gz]
    path = "m4bible"

    [[sources]]
    format = "moses"                  # also tsv, tmx, jsonl, po: see sources/
    source = "europarl.de-en.de.gz"
    english = "europarl.de-en.en.gz"
    language = "de"
    split = "train"                   # left out: dealt out to train, dev and test

    [[sources]]
    format = "jsonl"
    path = "web/*.jsonl.gz"           # every file that matches
    language = "pt-BR"
    source_field = "translation.pt"
    english_field = "translation.en"
    split = "train"

    [[sources]]
    format = "tfds"
    name = "ted_multi_translate"
    tfds_split = "train"
    languages = ["de", "zh"]          # left out: all

Paths are relative to the file, or absolute.
"""

import dataclasses
import glob
import math
import pathlib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from data_prep import corpus, languages, scripts, vocabulary
from data_prep.sources.line_files import JsonlFile, MosesFiles, TsvFile
from data_prep.sources.po import PoFile
from data_prep.sources.source import Source
from data_prep.sources.tfds_split import TfdsSplit
from data_prep.sources.tmx import TmxFile
from lingvo_gshard.input.manifest import SPLITS

MODEL_TYPES = ("bpe", "unigram")
# The least and the most that is allowed.
_RANGES = {
    "source_vocab_size": (vocabulary.MIN_SIZE, math.inf),
    "target_vocab_size": (vocabulary.MIN_SIZE, math.inf),
    "character_coverage": (0.98, 1),  # As SentencePiece takes it.
    "max_vocab_sentences": (1, math.inf),
    "vocab_temperature": (1, math.inf),
    "max_pieces": (1, math.inf),
    "max_malformed_share": (0, 1),
    "held_out_share": (0, 0.5),
    "max_chars": (1, math.inf),
    "max_length_ratio": (1, math.inf),
    "pairs_per_chunk": (1, math.inf),
    "pairs_per_shard": (1, math.inf),
}


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """What a prepared folder is made with. Lengths in pieces include EOS.

    Attributes:
        source_vocab_size: pieces.
        target_vocab_size: pieces.
        model_type: of SentencePiece, bpe or unigram.
        character_coverage: share of the characters that get pieces; others are written in bytes.
            Of three languages in Han among 71, 0.9995 writes 8 to 17 % of the pieces as bytes, and
            0.9999 1 to 5 %: the others' sentences become 0.2 % longer with 64000 pieces, 4 % with
            8000.
        max_vocab_sentences: that the vocabularies learn from.
        vocab_temperature: T of drawing these, a language's share proportional to n**(1/T).
        max_pieces: longer training pairs are dropped.
        max_malformed_share: of a file's lines, before giving up.
        held_out_share: of a source without a split, for each of dev and test.
        max_chars: longest side of a training pair.
        max_length_ratio: between the sides, in characters.
        check_language: whether sentences that are surely of another language are dropped.
        scripts: ISO 15924 codes by language, where its text should not decide.
        pairs_per_chunk: that a process holds in memory.
        pairs_per_shard: of a file of records, at most, or those of a chunk. Its writer takes some
            200 bytes of memory for each.
        seed: of drawing the vocabularies' text.
    """

    source_vocab_size: int = 8000
    target_vocab_size: int = 4000
    model_type: str = "bpe"
    character_coverage: float = 0.9999
    max_vocab_sentences: int = 300_000
    vocab_temperature: float = 5.0
    max_pieces: int = 128
    max_malformed_share: float = 0.01
    held_out_share: float = 0.01
    max_chars: int = 1000
    max_length_ratio: float = 5.0
    check_language: bool = False
    scripts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    pairs_per_chunk: int = 32_768
    pairs_per_shard: int = 32_768
    seed: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field, getattr(self, field.name))
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
                raise ValueError(f"{name} {value}: expected {expected}")
        if self.model_type not in MODEL_TYPES:
            raise ValueError(
                f"model_type {self.model_type!r}: expected one of {', '.join(MODEL_TYPES)}"
            )


def _check_type(field: dataclasses.Field, value: Any) -> None:
    kind = field.type
    if not isinstance(kind, type):  # The scripts, which `load` checks.
        return
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise ValueError(f"{field.name} {value!r}: expected a value of type {kind.__name__}")


def load(path: pathlib.Path, settings: Mapping[str, Any]) -> tuple[tuple[Source, ...], BuildConfig]:
    """Reads a file; `settings` go before what it says.

    Raises:
        ValueError: not TOML, an unknown key or value, or a file that is not there.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
        tables = fields.pop("sources", [])
        if not isinstance(tables, list):
            raise ValueError("sources: expected tables, each under [[sources]]")
        config = _build_config(fields | dict(settings))
        sources = tuple(source for table in tables for source in _sources(table, path.parent))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not sources:
        raise ValueError(f"{path}: no [[sources]]")
    return sources, config


def _build_config(fields: Mapping[str, Any]) -> BuildConfig:
    _check_keys("the file", fields, {field.name for field in dataclasses.fields(BuildConfig)})
    scripts_of = {
        languages.code(tag): scripts.checked(codes)
        for tag, codes in fields.get("scripts", {}).items()
    }
    return BuildConfig(**{**fields, "scripts": scripts_of})


def _sources(table: Mapping[str, Any], folder: pathlib.Path) -> list[Source]:
    fields = dict(table)
    name = fields.pop("format", None)
    if name not in _FORMATS:
        raise ValueError(f"sources: format {name!r}: expected one of {', '.join(_FORMATS)}")
    split = fields.get("split")
    if split is not None and split not in SPLITS:
        raise ValueError(f"sources: split {split!r}: expected one of {', '.join(SPLITS)}")
    if "language" in fields:
        fields["language"] = languages.code(fields["language"])
    if "languages" in fields:
        fields["languages"] = tuple(map(languages.code, fields["languages"]))
    return _FORMATS[name](fields, folder)


def _folder(fields: dict[str, Any], folder: pathlib.Path) -> list[Source]:
    _check_keys("a folder", fields, {"path"})
    return list(corpus.find(folder / fields["path"]))


def _moses(fields: dict[str, Any], folder: pathlib.Path) -> list[Source]:
    paths = _paths(fields, folder, "source", "english")
    return [_make(MosesFiles, {**fields, **paths})]


def _tfds(fields: dict[str, Any], folder: pathlib.Path) -> list[Source]:
    paths = _paths(fields, folder, "data_dir")
    return [_make(TfdsSplit, {**fields, **paths})]


def _paths(fields: dict[str, Any], folder: pathlib.Path, *names: str) -> dict[str, Any]:
    return {name: folder / fields[name] for name in names if name in fields}


def _each_file(cls: type) -> Callable[[dict[str, Any], pathlib.Path], list[Source]]:
    def make(fields: dict[str, Any], folder: pathlib.Path) -> list[Source]:
        found = sorted(glob.glob(str(folder / str(fields.get("path", ""))), recursive=True))
        paths = [path for path in map(pathlib.Path, found) if path.is_file()]
        if not paths:
            raise ValueError(f"sources: no file matches path {fields.get('path')!r}")
        return [_make(cls, {**fields, "path": path}) for path in paths]

    return make


def _make(cls: type, fields: Mapping[str, Any]) -> Source:
    known = dataclasses.fields(cls)
    _check_keys(cls.__name__, fields, {field.name for field in known})
    missing = [f.name for f in known if f.default is dataclasses.MISSING and f.name not in fields]
    if missing:
        raise ValueError(f"sources: {cls.__name__} needs {', '.join(missing)}")
    source: Source = cls(**fields)
    return source


def _check_keys(what: str, fields: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"{what} has no {', '.join(unknown)}: there is {', '.join(sorted(known))}")


_FORMATS: dict[str, Callable[[dict[str, Any], pathlib.Path], list[Source]]] = {
    "folder": _folder,
    "tsv": _each_file(TsvFile),
    "moses": _moses,
    "tmx": _each_file(TmxFile),
    "jsonl": _each_file(JsonlFile),
    "po": _each_file(PoFile),
    "tfds": _tfds,
}
