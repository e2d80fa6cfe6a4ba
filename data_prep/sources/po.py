"""gettext catalogs: the English is the message id, the source its translation."""

import dataclasses
import pathlib
from collections.abc import Iterator

import polib

from data_prep import tsv
from data_prep.sources.source import Row


@dataclasses.dataclass(frozen=True)
class PoFile:
    """The translated messages of a catalog; fuzzy and obsolete ones are left out.

    Of a message with plurals, the first form stands for the singular and the last for the plural.
    """

    path: pathlib.Path
    language: str
    split: str | None = None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return (self.path,)

    def __str__(self) -> str:
        return str(self.path)

    def rows(self) -> Iterator[Row]:
        """See Source."""
        if not self.path.is_file():
            raise ValueError(f"no file {self.path}")
        try:
            catalog = polib.pofile(str(self.path))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is no gettext catalog: {error}") from error
        for message in catalog.translated_entries():
            for source, english in _translations(message):
                yield Row(self.language, tsv.Pair.of(source, english))


def _translations(message: polib.POEntry) -> list[tuple[str, str]]:
    if not message.msgid_plural:
        return [(message.msgstr, message.msgid)]
    forms = [form for _, form in sorted(message.msgstr_plural.items())]
    return [(forms[0], message.msgid), (forms[-1], message.msgid_plural)]
