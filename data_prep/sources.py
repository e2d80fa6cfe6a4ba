"""The formats of parallel text. Each source yields rows of (language, pair) as a stream.

A folder of TSV files, the simplest corpus, has one of two layouts:

    DIR/{train,dev,test}/<lang>-en.tsv[.gz]    split already
    DIR/<lang>-en.tsv[.gz]                     the build holds out dev and test
"""

import dataclasses
import gzip
import itertools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import polib
from lxml import etree

from data_prep import languages, tsv
from data_prep.tsv import Malformed, Pair
from lingvo_gshard import cli
from lingvo_gshard.input.manifest import SPLITS

_TSV_NAME = re.compile(r"([A-Za-z0-9_-]+)-en\.tsv(\.gz)?")
_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
# TMX's other inline elements contain another format's codes and not text.
_TMX_TEXT_ELEMENTS = ("hi", "sub")


@dataclasses.dataclass(frozen=True)
class Row:
    """What one line holds, and the code of its source language; None has too low a score."""

    language: str
    pair: Pair | Malformed | None


class Source:
    """One file, or whatever else is named together; sources are read in parallel.

    `split` is train, dev or test; None distributes the pairs over the three by their English.
    """

    split: str | None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The files and folders that it reads, as far as they are known in advance."""
        return tuple(value for value in vars(self).values() if isinstance(value, pathlib.Path))

    def __str__(self) -> str:
        return " and ".join(map(str, self.files))

    def rows(self) -> Iterator[Row]:
        """Yields everything, in order. Raises ValueError if it is not in its format."""
        raise NotImplementedError

    def spans(self) -> list[range]:
        """Returns the parts, in order, that tasks may read apart: for most formats, only one."""
        return [tsv.WHOLE]

    def rows_in(self, span: range) -> Iterator[Row]:
        """Yields what is in one of the spans. Malformed rows are numbered from its start."""
        assert span == tsv.WHOLE
        return self.rows()


class _LineFile(Source):
    """A file with one pair a line, plain or gzip; a plain one is split by ranges of bytes."""

    path: pathlib.Path
    language: str

    def rows(self) -> Iterator[Row]:
        return self.rows_in(tsv.WHOLE)

    def spans(self) -> list[range]:
        return tsv.spans(self.path)

    def rows_in(self, span: range) -> Iterator[Row]:
        pairs = tsv.read_lines(self.path, self._parse, span)
        return (Row(self.language, pair) for pair in pairs)

    def _parse(self, line: str) -> Pair | None:
        """Returns a line's pair, None if its score is too low. Raises ValueError if it has none."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TsvFile(_LineFile):
    """`source<TAB>english` lines."""

    path: pathlib.Path
    language: str
    split: str | None = None

    def _parse(self, line: str) -> Pair:
        return tsv.parse(line)


@dataclasses.dataclass(frozen=True)
class ColumnsFile(_LineFile):
    """Lines of columns between tabs, as mined text has; their numbers begin at 0.

    Lines with a lower score than `min_score` are dropped, if a column has one.
    """

    path: pathlib.Path
    language: str
    source_column: int
    english_column: int
    score_column: int | None = None
    min_score: float = 0.0
    split: str | None = None

    def _parse(self, line: str) -> Pair | None:
        columns = line.split("\t")
        try:
            if self.score_column is not None and float(columns[self.score_column]) < self.min_score:
                return None
            return Pair.of(columns[self.source_column], columns[self.english_column])
        except IndexError as error:
            raise ValueError(f"there are only {len(columns)} columns") from error


@dataclasses.dataclass(frozen=True)
class MosesFiles(Source):
    """Two files, plain or gzip, whose lines with the same number are translations."""

    source: pathlib.Path
    english: pathlib.Path
    language: str
    split: str | None = None

    def rows(self) -> Iterator[Row]:
        sides: Any = (tsv.read_lines(path, str) for path in (self.source, self.english))
        both = itertools.zip_longest(*sides)
        for number, (source, english) in enumerate(both, start=1):
            if source is None or english is None:
                shorter = self.source if source is None else self.english
                differ = f"{self} differ in their number of lines"
                raise ValueError(f"{differ}: {shorter.name} ends after {number - 1}")
            malformed = [side for side in (source, english) if isinstance(side, Malformed)]
            yield Row(self.language, malformed[0] if malformed else Pair.of(source, english))


@dataclasses.dataclass(frozen=True)
class JsonlFile(_LineFile):
    """One JSON object a line; dots in a field's name lead into inner objects."""

    path: pathlib.Path
    language: str
    source_field: str
    english_field: str
    split: str | None = None

    def _parse(self, line: str) -> Pair:
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        return Pair.of(text_at(fields, self.source_field), text_at(fields, self.english_field))


@dataclasses.dataclass(frozen=True)
class PoFile(Source):
    """A gettext catalog's translated messages, without the fuzzy and the obsolete ones.

    For a message with plurals, the first form is the singular and the last one the plural.
    """

    path: pathlib.Path
    language: str
    split: str | None = None

    def rows(self) -> Iterator[Row]:
        if not self.path.is_file():
            raise ValueError(f"no file {self.path}")
        try:
            catalog = polib.pofile(str(self.path))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is no gettext catalog: {error}") from error
        for message in catalog.translated_entries():
            forms = [form for _, form in sorted(message.msgstr_plural.items())] or [message.msgstr]
            yield Row(self.language, Pair.of(forms[0], message.msgid))
            if message.msgid_plural:
                yield Row(self.language, Pair.of(forms[-1], message.msgid_plural))


@dataclasses.dataclass(frozen=True)
class TmxFile(Source):
    """A TMX 1.4 translation memory, plain or gzip; `languages` None takes all languages."""

    path: pathlib.Path
    languages: tuple[str, ...] | None = None
    split: str | None = None

    def rows(self) -> Iterator[Row]:
        try:
            with tsv.open_binary(self.path) as file:
                units = etree.iterparse(
                    file, tag="{*}tu", resolve_entities=False, no_network=True, load_dtd=False
                )
                for _, unit in units:
                    yield from _rows_of(_variants(unit), self.languages)
                    unit.clear()  # Frees the memory of what was read.
                    while (before := unit.getprevious()) is not None:
                        unit.getparent().remove(before)
        except (etree.XMLSyntaxError, gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{self.path} is not TMX: {error}") from error


@dataclasses.dataclass(frozen=True)
class TfdsSplit(Source):
    """A split of a TensorFlow Datasets translation set, such as ted_multi_translate.

    `name` and `tfds_split` are as for tfds.load, which downloads a set that is not prepared yet;
    `languages` None takes all languages.
    """

    name: str
    tfds_split: str
    data_dir: pathlib.Path | None = None
    languages: tuple[str, ...] | None = None
    split: str | None = None

    def __str__(self) -> str:
        return f"tfds {self.name}, split {self.tfds_split}"

    def rows(self) -> Iterator[Row]:
        # It loads TensorFlow, which takes seconds and which the other sources don't need.
        tfds = cli.load("tensorflow_datasets")
        data_dir = None if self.data_dir is None else str(self.data_dir)
        try:
            data = tfds.load(self.name, split=self.tfds_split, data_dir=data_dir)
        except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError) as error:
            raise ValueError(f"{self}: {error}") from error
        for example in tfds.as_numpy(data):
            yield from _rows_of(self._texts(example), self.languages)

    def _texts(self, example: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns the (language, text) pairs of an example."""
        found = example.get("translations", example)
        if {"language", "translation"} <= set(found):  # Two lists, as in ted_multi_translate.
            both = zip(found["language"], found["translation"], strict=True)
            return [(tag.decode(), text.decode()) for tag, text in both]
        # A text for each language, as in wmt*, opus, para_crawl and flores.
        texts = [(tag, text.decode()) for tag, text in found.items() if isinstance(text, bytes)]
        if len(texts) < 2:
            raise ValueError(f"{self} has features {sorted(example)}: expected a translation set")
        return texts


def in_folder(folder: pathlib.Path) -> tuple[TsvFile, ...]:
    """Lists the files of a corpus folder.

    Raises ValueError if there is no training text, or a file's name is not that of a language.
    """
    if not folder.is_dir():
        raise ValueError(f"no input folder {folder}")
    folders: dict[pathlib.Path, str | None] = {folder / split: split for split in SPLITS}
    if not any(path.is_dir() for path in folders):
        folders = {folder: None}
    train, *others = (_language_files(path, split) for path, split in folders.items())
    if not train:
        raise ValueError(f"no <lang>-en.tsv or <lang>-en.tsv.gz files in {next(iter(folders))}")
    return tuple(itertools.chain(train, *others))


def _language_files(folder: pathlib.Path, split: str | None) -> list[TsvFile]:
    files: dict[str, TsvFile] = {}
    for path in sorted(folder.glob("*")):
        if not path.name.endswith((".tsv", ".tsv.gz")):
            continue
        match = _TSV_NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: expected a name like de-en.tsv or de-en.tsv.gz")
        try:
            code = languages.code(match[1])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if code in files:
            raise ValueError(f"{path}: language {code} is also in {files[code].path.name}")
        files[code] = TsvFile(path, code, split)
    return list(files.values())


def value_at(fields: Any, dotted: str) -> Any:
    """Returns the value of a field, None if there is none; dots lead into inner objects."""
    for name in dotted.split("."):
        fields = fields.get(name) if isinstance(fields, dict) else None
    return fields


def text_at(fields: Any, dotted: str) -> str:
    """Returns the text of a field. Raises ValueError if there is none."""
    text = value_at(fields, dotted)
    if not isinstance(text, str):
        raise ValueError(f"no text in field {dotted!r}")
    return text


def _variants(unit: etree._Element) -> list[tuple[str, str]]:
    """Returns the (language, text) pairs of a TMX unit."""
    return [
        (tag, _text(segment))
        for variant in unit.iterchildren("{*}tuv")
        if (tag := variant.get(_XML_LANG) or variant.get("lang"))
        and (segment := variant.find("{*}seg")) is not None
    ]


def _text(element: etree._Element) -> str:
    parts = [element.text or ""]
    for child in element:
        if isinstance(child.tag, str) and etree.QName(child).localname in _TMX_TEXT_ELEMENTS:
            parts.append(_text(child))
        parts.append(child.tail or "")
    return "".join(parts)


def _rows_of(texts: list[tuple[str, str]], wanted: tuple[str, ...] | None) -> Iterator[Row]:
    """Yields the pairs of the wanted languages' texts with the first English one.

    A wanted code takes its own tag and, if no closer code is wanted, those of its regions: pt
    takes pt-BR. With `wanted` None every language but English counts, without its region.
    """
    valid = [(languages.primary(tag), tag, text) for tag, text in texts if languages.is_valid(tag)]
    english = [text for primary, _, text in valid if primary == languages.ENGLISH]
    for primary, tag, text in valid:
        codes = (languages.code(tag), primary)
        found = [primary] if wanted is None else [code for code in codes if code in wanted]
        if english and found and primary != languages.ENGLISH:
            yield Row(found[0], Pair.of(text, english[0]))
