"""The configuration of a build: a TOML file of sources and settings, as docs/data.md shows."""

import collections
import dataclasses
import glob
import inspect
import math
import pathlib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from data_prep import directions, languages, patterns, sources, tsv_folder
from data_prep.multilingual import TfdsSplit, TmxFile
from data_prep.parquet import ParquetFile
from data_prep.sources import Source
from lingvo_gshard.input.manifest import SPLITS

MODEL_TYPES = ("bpe", "unigram")
_FORMATS: dict[str, type[Source]] = dict(
    tsv=sources.TsvFile,
    tmx=TmxFile,
    jsonl=sources.JsonlFile,
    po=sources.PoFile,
    moses=sources.MosesFiles,
    columns=sources.ColumnsFile,
    parquet=ParquetFile,
    tfds=TfdsSplit,
)
# Two sources with the same text may differ in these fields.
_CHOICES = ("language", "languages", "language_codes", "score_column", "min_score")
_PLAIN_TYPES = {bool, int, float, str, types.NoneType}
_MIN_VOCAB_SIZE = 4 + 256 + 1  # The special ids, a piece for each byte, and one character.
_Made = TypeVar("_Made")


def _number(default: float, least: float, most: float = math.inf) -> Any:
    """A setting from `least` to `most`."""
    return dataclasses.field(default=default, metadata={"range": (least, most)})


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """The settings of a build. Lengths in pieces include EOS."""

    source_vocab_size: int = _number(8000, _MIN_VOCAB_SIZE)  # In pieces.
    target_vocab_size: int = _number(4000, _MIN_VOCAB_SIZE)
    model_type: str = "bpe"  # SentencePiece's algorithm.
    directions: str = "many_to_english"  # Or english_to_many or many_to_many: see directions.py.
    # The share of the characters that get pieces; others are written as bytes. For three languages
    # in Han among 71, 0.9995 makes 8 to 17 % of the pieces bytes, and 0.9999 only 1 to 5 %; the
    # other languages' sentences become 0.2 % longer with 64000 pieces, and 4 % with 8000.
    character_coverage: float = _number(0.9999, 0.98, 1)
    max_vocab_sentences: int = _number(300_000, 1)  # From which the vocabularies learn.
    vocab_temperature: float = _number(5.0, 1)  # T: languages share them in proportion to n**(1/T).
    max_pieces: int = _number(128, 1)  # Longer training pairs are dropped.
    max_malformed_share: float = _number(0.01, 0, 1)  # Of a file's lines; more is an error.
    held_out_share: float = _number(0.01, 0, 0.5)  # Each of dev's and test's, if there is no split.
    max_chars: int = _number(1000, 1)  # Of the longer side of a training pair.
    max_length_ratio: float = _number(5.0, 1)  # Between the sides' lengths in characters.
    check_language: bool = False  # Whether to drop sentences that are surely in another language.
    # ISO 15924 codes by language, if its text should not decide.
    scripts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    pairs_per_chunk: int = _number(32_768, 1)  # A process holds one chunk in memory.
    # Most pairs in a file of records, if no chunk has more. Its writer takes 200 bytes for each.
    pairs_per_shard: int = _number(32_768, 1)
    seed: int = _number(1, 0, 2**64 - 1)  # Decides which sentences the vocabularies learn from.

    def __post_init__(self) -> None:
        _check_types(self)
        for field in dataclasses.fields(self):
            if "range" in field.metadata:
                value, (least, most) = getattr(self, field.name), field.metadata["range"]
                expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
                if not least <= value <= most:
                    raise ValueError(f"{field.name} {value!r}: expected {expected}")
        _check_one_of("model_type", self.model_type, MODEL_TYPES)
        _check_one_of("directions", self.directions, tuple(directions.SETTINGS))


def load(
    path: pathlib.Path, settings: Mapping[str, Any], folder: pathlib.Path | None = None
) -> tuple[tuple[Source, ...], BuildConfig]:
    """Reads a configuration file; `settings` override it.

    Its paths are relative to `folder`, by default the file's. Raises ValueError if the file is not
    TOML, has an unknown key or a bad value, or names a file that is missing or named before.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8")) | dict(settings)
        tables = fields.pop("sources", [])
        if not isinstance(tables, list):
            raise ValueError("sources: expected tables, each under [[sources]]")
        named = {table.get("language_codes") for table in tables if isinstance(table, dict)}
        code = str if "source" in named else languages.code
        fields["scripts"] = {
            code(tag): languages.checked_scripts(codes)
            for tag, codes in fields.get("scripts", {}).items()
        }
        config = _call(BuildConfig, "the file", fields)
        folder = folder or path.parent
        found = tuple(source for table in tables for source in _sources(table, folder))
        _check_distinct(found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not found:
        raise ValueError(f"{path} has no [[sources]]: expected one or more")
    return found, config


def _check_distinct(found: Sequence[Source]) -> None:
    """Raises ValueError if two sources read the same text for one language and split."""
    seen: dict[Any, set[str]] = collections.defaultdict(set)
    for source in found:
        fields = {name: value for name, value in vars(source).items() if name not in _CHOICES}
        text = [one.resolve() if isinstance(one, pathlib.Path) else one for one in fields.values()]
        given = vars(source).get("languages", (vars(source).get("language"),))
        before, codes = seen[type(source), *text], set(given or "*")  # All languages.
        if before and (before & codes or "*" in before | codes):
            raise ValueError(f"sources: {source} is given twice for the same language and split")
        before |= codes


def _sources(table: Mapping[str, Any], folder: pathlib.Path) -> list[Source]:
    if any("{" in str(table.get(field)) for field in ("path", "source")):
        tables = patterns.expand(table, folder)
        return [source for each in tables for source in _sources(each, folder)]
    fields = dict(table)
    name = fields.pop("format", None)
    _check_one_of("sources: format", name, ("folder", *_FORMATS))
    codes = fields.get("language_codes", "standard")
    _check_one_of("sources: language_codes", codes, languages.NAMES)
    if name == "folder":
        fields |= {"path": folder / fields["path"]} if "path" in fields else {}
        return list(_call(tsv_folder.sources_in, "a folder", fields))
    _set_split(fields)
    if "languages" in fields:
        fields["languages"] = tuple(languages.named(tag, codes) for tag in fields["languages"])
    if "language" in fields:
        fields["language"] = languages.named(fields["language"], codes)
        fields.pop("language_codes", None)
        if fields["language"] not in fields.pop("languages", [fields["language"]]):
            return []
    if name in ("moses", "tfds"):
        paths = {"source", "english", "data_dir"} & fields.keys()
        return [_call(_FORMATS[name], name, fields | {key: folder / fields[key] for key in paths})]
    pattern = pathlib.Path(glob.escape(str(folder)), str(fields.get("path", "")))
    found = sorted(glob.glob(str(pattern), recursive=True))
    files = [file for file in map(pathlib.Path, found) if file.is_file()]
    if not files:
        raise ValueError(f"sources: no file in {folder} matches path {fields.get('path')!r}")
    return [_call(_FORMATS[name], name, fields | {"path": file}) for file in files]


def _set_split(fields: dict[str, Any]) -> None:
    """Checks a table's split, or replaces `text_split` by it."""
    name = fields.pop("text_split", None)
    if name is None:
        _check_one_of("sources: split", fields.get("split", "train"), SPLITS)
    elif name in SPLITS or not re.fullmatch("[a-z0-9_]+", name):
        expected = f"small letters, digits and _, and none of {', '.join(SPLITS)}"
        raise ValueError(f"sources: text_split {name!r}: expected {expected}")
    else:
        fields["split"] = name


def _call(function: Callable[..., _Made], owner: str, fields: Mapping[str, Any]) -> _Made:
    """Calls a function with a table's fields. Raises ValueError if one is missing or unknown."""
    known = inspect.signature(function).parameters
    required = [name for name, one in known.items() if one.default is one.empty]
    if unknown := ", ".join(sorted(fields.keys() - known)):
        raise ValueError(f"{owner} has no setting {unknown}, only {', '.join(sorted(known))}")
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"{owner} needs {', '.join(missing)}")
    made = function(**fields)
    if dataclasses.is_dataclass(made):
        _check_types(made)
    return made


def _check_types(made: Any) -> None:
    """Raises ValueError unless each field that has a plain type, or None, has a value of it."""
    for field in dataclasses.fields(made):
        value, kinds = getattr(made, field.name), typing.get_args(field.type) or (field.type,)
        if float in kinds and type(value) is int:
            continue
        if {*kinds} <= _PLAIN_TYPES and type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
            raise ValueError(f"{field.name} {value!r}: expected a value of type {expected}")


def _check_one_of(name: str, value: Any, expected: Sequence[str]) -> None:
    if value not in expected:
        raise ValueError(f"{name} {value!r}: expected one of {', '.join(expected)}")
