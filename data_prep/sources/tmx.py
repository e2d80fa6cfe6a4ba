"""Translation memories: TMX 1.4 files, plain or gzip, read as a stream."""

import dataclasses
import gzip
import pathlib
from collections.abc import Iterator

from lxml import etree

from data_prep import tsv
from data_prep.sources.source import Row, is_english, matching_code

_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
# What is inside these is text; inside all other inline elements it is a format's own code.
_TEXT_ELEMENTS = ("hi", "sub")


@dataclasses.dataclass(frozen=True)
class TmxFile:
    """Every unit's variants in `languages` (None: in all) beside its English one."""

    path: pathlib.Path
    languages: tuple[str, ...] | None = None
    split: str | None = None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return (self.path,)

    def __str__(self) -> str:
        return str(self.path)

    def rows(self) -> Iterator[Row]:
        """See Source; ValueError also for what is no XML, or a language that there is not."""
        if not self.path.is_file():
            raise ValueError(f"no file {self.path}")
        open_file = gzip.open if self.path.suffix == ".gz" else open
        try:
            with open_file(self.path, "rb") as file:
                units = etree.iterparse(
                    file, tag="{*}tu", resolve_entities=False, no_network=True, load_dtd=False
                )
                for _, unit in units:
                    yield from self._unit_rows(unit)
                    _forget(unit)
        except (etree.XMLSyntaxError, gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{self.path} is not TMX: {error}") from error

    def _unit_rows(self, unit: etree._Element) -> Iterator[Row]:
        variants = [
            (tag, _text(segment))
            for variant in unit.iterchildren("{*}tuv")
            if (tag := variant.get(_LANG) or variant.get("lang"))
            and (segment := variant.find("{*}seg")) is not None
        ]
        english = next((text for tag, text in variants if is_english(tag)), None)
        if english is None:
            return
        for tag, text in variants:
            code = matching_code(tag, self.languages)
            if code is not None:
                yield Row(code, tsv.Pair.of(text, english))


def _text(element: etree._Element) -> str:
    parts = [element.text or ""]
    for child in element:
        if isinstance(child.tag, str) and etree.QName(child).localname in _TEXT_ELEMENTS:
            parts.append(_text(child))
        parts.append(child.tail or "")
    return "".join(parts)


def _forget(unit: etree._Element) -> None:
    """Frees a unit that was read, and what came before it."""
    unit.clear()
    while (before := unit.getprevious()) is not None:
        unit.getparent().remove(before)
