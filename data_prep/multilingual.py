"""Sources of text in many languages, of which each is paired with English: TMX, and TFDS."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from lxml import etree

from data_prep import languages, tsv
from data_prep.sources import Row, Source
from data_prep.tsv import Pair
from lingvo_gshard import cli

_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
# TMX's inline elements with another format's codes and not text.
_TMX_CODES = ("{*}bpt", "{*}ept", "{*}it", "{*}ph", "{*}ut")


@dataclasses.dataclass(frozen=True)
class TmxFile(Source):
    """A TMX 1.4 translation memory, plain or gzip; `languages` None takes all languages."""

    path: pathlib.Path
    languages: tuple[str, ...] | None = None
    split: str | None = None
    language_codes: str = "standard"

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        try:
            with tsv.open_binary(self.path) as file:
                units = etree.iterparse(
                    file, tag="{*}tu", resolve_entities=False, no_network=True, load_dtd=False
                )
                for _, unit in units:
                    etree.strip_elements(unit, *_TMX_CODES, with_tail=False)
                    texts = [
                        (tag, "".join(segment.itertext()))
                        for variant in unit.iterchildren("{*}tuv")
                        if (tag := variant.get(_XML_LANG) or variant.get("lang"))
                        and (segment := variant.find("{*}seg")) is not None
                    ]
                    yield from _rows_of(texts, self)
                    unit.clear()  # Frees the memory of what was read.
                    while (before := unit.getprevious()) is not None:
                        unit.getparent().remove(before)
        except etree.XMLSyntaxError as error:
            raise ValueError(f"{self.path} is not TMX: {error}") from error


@dataclasses.dataclass(frozen=True)
class TfdsSplit(Source):
    """A split of a TensorFlow Datasets translation set, such as ted_multi_translate."""

    name: str  # As for tfds.load, like the next. It downloads a set that is not prepared yet.
    tfds_split: str
    data_dir: pathlib.Path | None = None
    languages: tuple[str, ...] | None = None  # None takes all.
    split: str | None = None
    language_codes: str = "standard"

    def __str__(self) -> str:
        return f"tfds {self.name}, split {self.tfds_split}"

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        # It loads TensorFlow, which takes seconds and which the other sources don't need.
        tfds = cli.load("tensorflow_datasets")
        try:
            data = tfds.load(self.name, split=self.tfds_split, data_dir=self.data_dir)
        except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError) as error:
            raise ValueError(f"{self}: {error}") from error
        for example in tfds.as_numpy(data):
            yield from _rows_of(self._texts(example), self)

    def _texts(self, example: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns the (language, text) pairs of an example."""
        found = example.get("translations", example)
        if {"language", "translation"} <= set(found):  # Two lists, as in ted_multi_translate.
            both = zip(found["language"], found["translation"], strict=True)
            return [(tag.decode(), text.decode()) for tag, text in both]
        # A text for each language, as in wmt*, opus, para_crawl and flores.
        texts = [(tag, text.decode()) for tag, text in found.items() if isinstance(text, bytes)]
        if len(texts) < 2:
            raise ValueError(f"{self} has features {sorted(example)}: expected several languages")
        return texts


def _rows_of(texts: list[tuple[str, str]], source: "TmxFile | TfdsSplit") -> Iterator[Row]:
    """Yields the pairs of the wanted languages' texts with the first English one.

    A wanted code takes its own tag and, if no closer code is wanted, those of its regions: pt takes
    pt-BR. If a source wants no code, every language but English counts, without its region. A
    source's own name takes that name alone.
    """
    wanted, names = source.languages, source.language_codes
    valid = [(tag, text) for tag, text in texts if languages.is_name(tag, names)]
    english = [text for tag, text in valid if languages.is_english(tag)]
    for tag, text in valid:
        codes = [languages.named(tag, names)]
        if names == "standard":
            codes += [languages.primary(tag)]
        found = codes[-1:] if wanted is None else [code for code in codes if code in wanted]
        if english and found and not languages.is_english(tag):
            yield Row(found[0], Pair.of(text, english[0]))
