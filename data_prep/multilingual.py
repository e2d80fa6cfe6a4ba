"""Sources of text in many languages, each paired with one of them, English: TMX and TFDS."""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lxml import etree

from data_prep import characters, languages, tsv, xml_repair
from data_prep.languages import ENGLISH
from data_prep.rules import Rule
from data_prep.sources import Row, Source
from data_prep.tsv import Malformed, Pair
from lingvo_gshard.files import text_file

_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_SAMPLED_EXAMPLES = 4000
# TMX's inline elements whose content is codes of another format instead of text.
_TMX_CODES = ("{*}bpt", "{*}ept", "{*}it", "{*}ph", "{*}ut")
# Inline elements that replace something, such as a line break. The other ones are the format of the
# enclosed text, which may be part of a word.
_TMX_PLACEHOLDERS = ("{*}ph", "{*}ut")
_PLACEHOLDER = "\ufdd0"  # A noncharacter, which never occurs in text.
# The last letter of a word, with its marks, before placeholders, and the first letter of the next.
_BETWEEN_WORDS = re.compile(rf"(\w)([{characters.MARKS}]*){_PLACEHOLDER}+(?=(\w))")


class _Multilingual(Source):
    """Text in many languages, each of which is paired with `target_language`."""

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
                if not xml_repair.is_wide(head):  # XML may be in UTF-16, unlike plain text.
                    text_file.check_head(head, str(self.path))

                # The parser reads only this file, whatever it refers to. Its entities are replaced.
                units = etree.iterparse(
                    xml_repair.Repaired(file),
                    tag="{*}tu",
                    resolve_entities=False,
                    no_network=True,
                    load_dtd=False,
                    huge_tree=True,  # A segment over 10 MB is too long, but is not damage.
                )
                for _, unit in units:
                    yield from _rows_of(_texts_of_unit(unit), self)

                    # Free the memory of the unit: lxml keeps the whole tree otherwise.
                    unit.clear()
                    while (read_before := unit.getprevious()) is not None:
                        unit.getparent().remove(read_before)
        except (etree.XMLSyntaxError, xml_repair.UnknownEncodingError) as error:
            raise ValueError(f"{self.path} is not TMX: {error}") from error


def _texts_of_unit(unit: Any) -> list[tuple[str, str]]:
    """Returns the (language, text) pairs of a translation unit, an element of lxml.

    A text is Malformed if it, or its language, is given more than once.
    """
    for placeholder in unit.iter(*_TMX_PLACEHOLDERS):
        placeholder.tail = _PLACEHOLDER + (placeholder.tail or "")
    etree.strip_elements(unit, *_TMX_CODES, with_tail=False)
    return [_text_of_variant(variant) for variant in unit.iterchildren("{*}tuv")]


def _text_of_variant(variant: Any) -> tuple[str, str]:
    # In earlier versions of TMX, the attribute lacks a namespace.
    tags = [variant.get(name, "").strip() for name in (_XML_LANG, "lang")]
    tag = tags[0] or tags[1]
    if all(tags) and tags[0].casefold() != tags[1].casefold():
        return tag, Malformed(f"a text has two languages, {tags[0]} and {tags[1]}")

    segments = variant.findall("{*}seg")
    if len(segments) > 1:
        return tag, Malformed(f"a text has {len(segments)} segments, expected one")
    text = "" if not segments else "".join(segments[0].itertext())
    return tag, _without_placeholders(text)


def _without_placeholders(text: str) -> str:
    """Returns a text with spaces for placeholders between words that need spaces."""
    if _PLACEHOLDER not in text:
        return text
    return _BETWEEN_WORDS.sub(_separated, text).replace(_PLACEHOLDER, "")


def _separated(match: re.Match[str]) -> str:
    """Returns the letter and marks before placeholders, and a space if the words need one."""
    letter, marks, next_letter = match.groups()
    if characters.is_unspaced(letter) and characters.is_unspaced(next_letter):
        return letter + marks
    return f"{letter}{marks} "


class TfdsSource(Source):
    """A split of a TensorFlow Datasets data set, which is downloaded if it is not prepared yet."""

    name: str  # An argument of tfds.load, as are the next two.
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
        """Returns the rows of an example."""
        raise NotImplementedError

    def examples(self, at_least: int | None = None) -> Iterator[dict[str, Any]]:
        """Yields the split's examples; with `at_least`, about that many, evenly spaced.

        Raises ValueError if the split or the library is missing.
        """
        # Imported here since it loads TensorFlow, which takes seconds and which other sources
        # don't need.
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
            # An unknown number of examples is negative.
            data = data.shard(max(1, int(data.cardinality()) // at_least), 0)
        yield from tfds.as_numpy(data)


@dataclasses.dataclass(frozen=True)
class TfdsSplit(TfdsSource, _Multilingual):
    """A translation data set, such as ted_multi_translate."""

    name: str
    tfds_split: str
    data_dir: pathlib.Path | None = None
    languages: tuple[str, ...] | None = None  # None takes all languages.
    split: str | None = None
    language_codes: str = "standard"
    target_language: str = ENGLISH

    def _rows_of(self, example: dict[str, Any]) -> Iterable[Row]:
        return _rows_of(self._texts(example), self)

    def _texts(self, example: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns the (language, text) pairs of an example."""
        features = example.get("translations", example)

        # Two lists, such as in ted_multi_translate.
        if {"language", "translation"} <= set(features):
            both = zip(features["language"], features["translation"], strict=True)
            return [(tag.decode(), text.decode()) for tag, text in both]

        # A text for each language, such as in wmt*, opus, para_crawl and flores.
        texts = [(tag, text.decode()) for tag, text in features.items() if isinstance(text, bytes)]
        if len(texts) < 2:
            raise ValueError(f"{self} has features {sorted(example)}: expected several languages")
        return texts


def _rows_of(texts: list[tuple[str, str]], source: "TmxFile | TfdsSplit") -> Iterator[Row]:
    """Yields a row for each text in a wanted language, paired with the first target text.

    See `_wanted_code`. Text whose tag is not a valid name is counted under that tag, whichever
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
            yield Row(pair, _paired(text, targets))


def _paired(text: str, targets: Sequence[str]) -> Pair | Malformed | Rule:
    """Returns the pair of a text and the first of its unit's `targets`."""
    if not targets:
        return Rule.UNPAIRED
    for side in (text, targets[0]):
        if isinstance(side, Malformed):
            return side
    return Pair.of(text, targets[0])


def _is_target(tag: str, source: "TmxFile | TfdsSplit") -> bool:
    """Returns whether a tag means the language with which all others are paired."""
    target = source.target_language
    if languages.is_english(target):
        return languages.is_english(tag)
    if source.language_codes == "source":
        return tag == target
    return languages.is_valid(tag) and target in (languages.code(tag), languages.primary(tag))


def _wanted_code(tag: str, source: "TmxFile | TfdsSplit") -> str | None:
    """Returns the code of the wanted language to which a tag belongs; None if it is not wanted.

    A wanted code takes its own tag and, if no closer code is wanted, the tags of its regions: pt
    takes pt-BR. If a source does not list languages, all are wanted, without their regions. With a
    source's own names, only the same name is taken.
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
