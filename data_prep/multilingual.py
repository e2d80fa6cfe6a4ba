"""Sources of text in many languages, each of which is paired with one, English: TMX, and TFDS."""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from lxml import etree

from data_prep import languages, tsv, xml_repair
from data_prep.languages import ENGLISH
from data_prep.rules import Rule
from data_prep.sources import Row, Source
from data_prep.tsv import Pair
from lingvo_gshard.files import text_file

_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_SAMPLED_EXAMPLES = 4000
# TMX's inline elements that hold codes of another format instead of text.
_TMX_CODES = ("{*}bpt", "{*}ept", "{*}it", "{*}ph", "{*}ut")
# Those that stand for something, such as a line break; the others are the format of what they
# enclose, which may be a part of a word.
_TMX_PLACEHOLDERS = ("{*}ph", "{*}ut")
_PLACEHOLDER = "\ufdd0"  # No character of any text.
# Letters of scripts that are written without spaces: Thai to Burmese, Khmer, kana and Han.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_BETWEEN_WORDS = re.compile(
    rf"(?<=\w){_PLACEHOLDER}+(?=\w)(?:(?<![{_UNSPACED}]{_PLACEHOLDER})|(?![{_UNSPACED}]))"
)


class _Multilingual(Source):
    """Text in many languages, each of which is paired with that of `target_language`."""

    target_language: str

    @property
    def is_without_english(self) -> bool:
        return not languages.is_english(self.target_language)


@dataclasses.dataclass(frozen=True)
class TmxFile(_Multilingual):
    """A TMX 1.4 translation memory, plain or gzip; `languages` None takes all languages."""

    path: pathlib.Path
    languages: tuple[str, ...] | None = None
    split: str | None = None
    language_codes: str = "standard"
    target_language: str = ENGLISH

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        try:
            with text_file.opened(self.path) as file:
                head = file.read(text_file.HEAD_BYTES)
                file.seek(0)
                if not xml_repair.is_wide(head):  # XML may be in UTF-16, which text may not.
                    text_file.check_head(head, str(self.path))

                # Nothing outside the file is read, whatever it names.
                units = etree.iterparse(
                    xml_repair.Repaired(file),
                    tag="{*}tu",
                    resolve_entities=False,
                    no_network=True,
                    load_dtd=False,
                    huge_tree=True,  # A segment over 10 MB is too long, and no damage.
                )
                for _, unit in units:
                    yield from _rows_of(_texts_of_unit(unit), self)

                    # Free the memory of what was read: lxml keeps the tree otherwise.
                    unit.clear()
                    while (read_before := unit.getprevious()) is not None:
                        unit.getparent().remove(read_before)
        except etree.XMLSyntaxError as error:
            raise ValueError(f"{self.path} is not TMX: {error}") from error


def _texts_of_unit(unit: Any) -> list[tuple[str, str]]:
    """Returns the (language, text) pairs of a translation unit, an element of lxml."""
    for placeholder in unit.iter(*_TMX_PLACEHOLDERS):
        placeholder.tail = _PLACEHOLDER + (placeholder.tail or "")
    etree.strip_elements(unit, *_TMX_CODES, with_tail=False)
    texts = []
    for variant in unit.iterchildren("{*}tuv"):
        # Earlier versions of TMX have an attribute without a namespace.
        tag = variant.get(_XML_LANG) or variant.get("lang")
        segment = variant.find("{*}seg")
        text = "" if segment is None else "".join(segment.itertext())
        texts.append(((tag or "").strip(), _without_placeholders(text)))
    return texts


def _without_placeholders(text: str) -> str:
    """Returns a text with a space for each placeholder between words that spaces separate."""
    return _BETWEEN_WORDS.sub(" ", text).replace(_PLACEHOLDER, "")


class TfdsSource(Source):
    """A split of a set of TensorFlow Datasets, which downloads one that is not prepared yet."""

    name: str  # As for tfds.load, like the next two.
    tfds_split: str
    data_dir: pathlib.Path | None

    def __str__(self) -> str:
        return f"tfds {self.name}, split {self.tfds_split}"

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        return itertools.chain.from_iterable(map(self._rows_of, self.examples()))

    def sampled_rows(self) -> Iterator[Row]:
        sample = self.examples(_SAMPLED_EXAMPLES)
        return itertools.chain.from_iterable(map(self._rows_of, sample))

    def _rows_of(self, example: dict[str, Any]) -> Iterable[Row]:
        """Returns the rows that an example has."""
        raise NotImplementedError

    def examples(self, at_least: int | None = None) -> Iterator[dict[str, Any]]:
        """Yields the split's examples, or `at_least` so many at even distances, if it has them.

        Raises ValueError if the split, or the library, is not there.
        """
        # It loads TensorFlow, which takes seconds and which the other sources don't need.
        try:
            import tensorflow_datasets as tfds
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{self}: needs TensorFlow Datasets: pip install 'lingvo_gshard[tfds]'"
            ) from error

        try:
            data = tfds.load(self.name, split=self.tfds_split, data_dir=self.data_dir)
        except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError) as error:
            raise ValueError(f"{self}: {error}") from error

        if at_least is not None:
            # The number of examples is negative if it is not known.
            data = data.shard(max(1, int(data.cardinality()) // at_least), 0)
        yield from tfds.as_numpy(data)


@dataclasses.dataclass(frozen=True)
class TfdsSplit(TfdsSource, _Multilingual):
    """A translation set, such as ted_multi_translate."""

    name: str
    tfds_split: str
    data_dir: pathlib.Path | None = None
    languages: tuple[str, ...] | None = None  # None takes all.
    split: str | None = None
    language_codes: str = "standard"
    target_language: str = ENGLISH

    def _rows_of(self, example: dict[str, Any]) -> Iterable[Row]:
        return _rows_of(self._texts(example), self)

    def _texts(self, example: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns the (language, text) pairs of an example."""
        features = example.get("translations", example)

        # Two lists, as in ted_multi_translate.
        if {"language", "translation"} <= set(features):
            both = zip(features["language"], features["translation"], strict=True)
            return [(tag.decode(), text.decode()) for tag, text in both]

        # A text for each language, as in wmt*, opus, para_crawl and flores.
        texts = [(tag, text.decode()) for tag, text in features.items() if isinstance(text, bytes)]
        if len(texts) < 2:
            raise ValueError(f"{self} has features {sorted(example)}: expected several languages")
        return texts


def _rows_of(texts: list[tuple[str, str]], source: "TmxFile | TfdsSplit") -> Iterator[Row]:
    """Yields a row for each text of a wanted language, paired with the first of the target's.

    See `_wanted_code`. Texts under what is no name of a language are counted under that, whichever
    languages are wanted, as it may be another spelling of one of them.
    """
    targets = [text for tag, text in texts if _is_target(tag, source)]
    if len(targets) == len(texts):
        yield Row(source.target_language, Rule.UNPAIRED)

    for tag, text in texts:
        if not languages.is_name(tag, source.language_codes):
            yield Row(languages.printable(tag), Rule.UNKNOWN_LANGUAGE)
            continue
        code = _wanted_code(tag, source)
        if code is not None and not _is_target(tag, source):
            pair = languages.paired(code, source.target_language)
            yield Row(pair, Pair.of(text, targets[0]) if targets else Rule.UNPAIRED)


def _is_target(tag: str, source: "TmxFile | TfdsSplit") -> bool:
    """Returns whether a tag is that of the language with which all others are paired."""
    target = source.target_language
    if languages.is_english(target):
        return languages.is_english(tag)
    if source.language_codes == "source":
        return tag == target
    return languages.is_valid(tag) and target in (languages.code(tag), languages.primary(tag))


def _wanted_code(tag: str, source: "TmxFile | TfdsSplit") -> str | None:
    """Returns the code of the wanted language that a tag counts for, None if it is not wanted.

    A wanted code takes its own tag and, if no closer code is wanted, those of its regions: pt takes
    pt-BR. If a source names no languages, all are wanted, without their regions. A source's own
    name takes that name alone.
    """
    codes = [languages.named(tag, source.language_codes)]
    if source.language_codes == "standard":
        codes.append(languages.primary(tag))

    if source.languages is None:
        return codes[-1]
    for code in codes:
        if code in source.languages:
            return code
    return None
