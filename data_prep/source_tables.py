"""The [[sources]] of a configuration file: each table names text, and becomes one or more sources.

A table's `format` chooses the class of its sources; its other fields are the arguments of that
class.
"""

import collections
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_prep import characters, checks, languages, patterns, text_folder, tsv_folder
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

# The formats of each kind of data; text can also be one side of a format of pairs.
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
# Two sources with the same text may differ in these fields, which select a part of it.
_CHOICES = (
    "language",
    "languages",
    "language_codes",
    "target_language",
    "score_column",
    "min_score",
    "corpus",
)


def of_table(table: Mapping[str, Any], folder: pathlib.Path, kind: Kind) -> list[Source]:
    """Returns the sources of a table for a kind of data; its paths are relative to `folder`."""
    tables: Sequence[Mapping[str, Any]] = [table]
    if any(_has_placeholders(table.get(field), folder) for field in ("path", "source")):
        tables = patterns.expand(table, folder)

    sources: list[Source] = []
    for filled_in in tables:
        if kind is Kind.TEXT and "side" in filled_in:
            sources += _one_sides(filled_in, folder)
        else:
            sources += _sources_without_placeholders(filled_in, folder, kind)
    return sources


def _has_placeholders(path: Any, folder: pathlib.Path) -> bool:
    """Returns whether a path has placeholders; braces in an existing path are part of its name."""
    return "{" in str(path) and not os.path.exists(folder / str(path))


def _one_sides(table: Mapping[str, Any], folder: pathlib.Path) -> list[Source]:
    """Returns the sources of a table that takes one side of pairs."""
    fields = dict(table)
    side = fields.pop("side")
    checks.one_of("sources: side", side, SIDES)
    corpus = fields.pop("corpus", None)
    if corpus is not None:
        _check_corpus(corpus)

    sources: list[Source] = []
    for pairs in _sources_without_placeholders(fields, folder, Kind.PARALLEL):
        sources.append(OneSide(pairs, side, corpus, pairs.split))
    return sources


def _check_corpus(corpus: Any) -> None:
    """Raises ValueError if this is not a valid name for a corpus."""
    # Names become parts of file names.
    if not isinstance(corpus, str) or not re.fullmatch(f"[{characters.NAME}]+", corpus):
        raise ValueError(f"sources: corpus {corpus!r}: expected letters, digits, - and _")


def _sources_without_placeholders(
    table: Mapping[str, Any], folder: pathlib.Path, kind: Kind
) -> Sequence[Source]:
    """Returns the sources of a table for a kind of data, without `side` and placeholders."""
    fields = dict(table)
    format_name = fields.pop("format", None)
    _check_format(format_name, kind)
    language_codes = fields.get("language_codes", "standard")
    checks.one_of("sources: language_codes", language_codes, languages.NAMES)

    # In a folder, the names of files give languages and splits.
    if format_name == "folder":
        if "path" in fields:
            fields["path"] = folder / fields["path"]
        return checks.call(FOLDERS[kind], "a folder", fields)

    # All other formats share these fields.
    _set_split(fields)
    if "corpus" in fields:
        _check_corpus(fields["corpus"])
    if "document" in fields:
        checks.one_of("sources: document", fields["document"], DOCUMENTS)
    _name_languages(fields, language_codes)
    if "language" in fields:
        # Beside a placeholder, `languages` only decides whether the language is wanted.
        wanted = fields.pop("languages", None)
        fields.pop("language_codes", None)
        target = fields.pop("target_language", languages.ENGLISH)
        if wanted is not None and not {fields["language"], target} <= {*wanted, languages.ENGLISH}:
            return []
        fields["language"] = languages.paired(fields["language"], target)

    # These formats name their files one by one, or do not read files.
    source_type = _FORMATS[kind][format_name]
    if format_name in ("moses", "tfds"):
        for name in ("source", "english", "data_dir"):
            if name in fields:
                fields[name] = folder / fields[name]
        return [checks.call(source_type, format_name, fields)]

    files = _matching_files(folder, fields.get("path", ""))
    if not files:
        raise ValueError(f"sources: no file in {folder} matches path {fields.get('path')!r}")
    return [checks.call(source_type, format_name, fields | {"path": file}) for file in files]


def _name_languages(fields: dict[str, Any], codes: str) -> None:
    """Replaces the languages of a table by their standard codes, or checks a source's names."""
    for name in ("language", "target_language"):
        if name in fields:
            fields[name] = languages.named(fields[name], codes)
    if "languages" in fields:
        fields["languages"] = tuple(languages.named(tag, codes) for tag in fields["languages"])


def _check_format(name: Any, kind: Kind) -> None:
    """Raises ValueError if this kind of data does not have a format of this name."""
    expected = ("folder", *_FORMATS[kind])
    if kind is Kind.TEXT and name not in expected and name in _FORMATS[Kind.PARALLEL]:
        raise ValueError(
            f"sources: format {name!r} has pairs: for text, choose one side of them, such as "
            f"side = {SIDES[-1]!r}"
        )
    checks.one_of("sources: format", name, expected)


def _matching_files(folder: pathlib.Path, pattern: Any) -> list[pathlib.Path]:
    """Returns the files in `folder` that match a pattern, sorted; or the file with this name."""
    if os.path.isfile(folder / str(pattern)):
        return [folder / str(pattern)]
    paths = [folder / path for path in patterns.matching(str(pattern), folder)]
    return [path for path in paths if path.is_file()]


def _set_split(fields: dict[str, Any]) -> None:
    """Checks a table's split, or replaces `text_split` by it."""
    text_split = fields.pop("text_split", None)
    if text_split is None:
        checks.one_of("sources: split", fields.get("split", "train"), SPLITS)
        return

    if text_split in SPLITS or not re.fullmatch("[a-z0-9_]+", text_split):
        expected = f"small letters, digits and _, other than {', '.join(SPLITS)}"
        raise ValueError(f"sources: text_split {text_split!r}: expected {expected}")
    fields["split"] = text_split


@dataclasses.dataclass(frozen=True)
class _Claim:
    """The text that a source reads, and the languages that it takes from it; None is all."""

    text: tuple[Any, ...]
    languages: frozenset[str] | None

    @classmethod
    def of(cls, source: Source) -> "_Claim":
        """Returns a source's claim. Its text is all fields except _CHOICES."""
        if isinstance(source, OneSide):
            of_pairs = cls.of(source.pairs)
            return cls((source.side, *of_pairs.text), of_pairs.languages)

        text: list[Any] = [type(source)]
        for name, value in vars(source).items():
            if name not in _CHOICES:
                # Two spellings of a path mean the same file.
                text.append(value.resolve() if isinstance(value, pathlib.Path) else value)

        # A source of one language has `language`; a source of several may have `languages`.
        taken = getattr(source, "languages", None)
        if hasattr(source, "language"):
            taken = [source.language]
        return cls(tuple(text), frozenset(taken) if taken else None)

    def overlaps(self, other: "_Claim") -> bool:
        """Returns whether two claims on the same text share a language."""
        if self.languages is None or other.languages is None:
            return True
        return not self.languages.isdisjoint(other.languages)


def check_distinct(sources: Sequence[Source]) -> None:
    """Raises ValueError if two sources read the same text for one language and split."""
    claims: dict[Any, list[_Claim]] = collections.defaultdict(list)  # By their text.
    for source in sources:
        claim = _Claim.of(source)
        if any(claim.overlaps(earlier) for earlier in claims[claim.text]):
            raise ValueError(f"sources: {source} is given twice for the same language and split")
        claims[claim.text].append(claim)
