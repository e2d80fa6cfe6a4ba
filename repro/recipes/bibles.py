"""Published Bibles, and their verses by book, chapter and number.

Two formats are read: a table Book,Chapter,Verse,Text (bible_databases, `formats/csv`), whose books
have English names, and XML of the Corpus Encoding Standard (bible-corpus, `bibles`), which marks a
verse as `<seg id="b.GEN.1.1" type="verse">`.
"""

import csv
import dataclasses
import io
import re
import unicodedata
from collections.abc import Iterator
from xml.etree import ElementTree

_HEADER = ["Book", "Chapter", "Verse", "Text"]
_VERSE_ID = re.compile(r"b\.(\w+)\.(\d+)\.(\d+)")

# The books in their order: the names in tables, and the codes in XML.
_BOOKS = """
Genesis=GEN, Exodus=EXO, Leviticus=LEV, Numbers=NUM, Deuteronomy=DEU, Joshua=JOS, Judges=JDG,
Ruth=RUT, I Samuel=1SA, II Samuel=2SA, I Kings=1KI, II Kings=2KI, I Chronicles=1CH,
II Chronicles=2CH, Ezra=EZR, Nehemiah=NEH, Esther=EST, Job=JOB, Psalms=PSA, Proverbs=PRO,
Ecclesiastes=ECC, Song of Solomon=SON, Isaiah=ISA, Jeremiah=JER, Lamentations=LAM, Ezekiel=EZE,
Daniel=DAN, Hosea=HOS, Joel=JOE, Amos=AMO, Obadiah=OBA, Jonah=JON, Micah=MIC, Nahum=NAH,
Habakkuk=HAB, Zephaniah=ZEP, Haggai=HAG, Zechariah=ZEC, Malachi=MAL, Matthew=MAT, Mark=MAR,
Luke=LUK, John=JOH, Acts=ACT, Romans=ROM, I Corinthians=1CO, II Corinthians=2CO, Galatians=GAL,
Ephesians=EPH, Philippians=PHI, Colossians=COL, I Thessalonians=1TH, II Thessalonians=2TH,
I Timothy=1TI, II Timothy=2TI, Titus=TIT, Philemon=PHM, Hebrews=HEB, James=JAM, I Peter=1PE,
II Peter=2PE, I John=1JO, II John=2JO, III John=3JO, Jude=JUD, Revelation of John=REV
"""
_NAMES_AND_CODES = [book.strip().partition("=") for book in _BOOKS.split(",")]
_NAMES_BY_CODE = {code: name for name, _, code in _NAMES_AND_CODES}
BOOKS = {name: index for index, name in enumerate(_NAMES_BY_CODE.values())}


@dataclasses.dataclass(frozen=True, order=True)
class Reference:
    """The place of a verse; references sort in the order of the Bible."""

    book: int  # An index of BOOKS.
    chapter: int
    verse: int


Verses = dict[Reference, str]


@dataclasses.dataclass(frozen=True)
class Bible:
    """The verses of a published Bible."""

    verses: Verses  # The verses of BOOKS, in NFC.
    other_books: tuple[str, ...]  # The file's names of its other books, such as apocrypha.


def read(path: str, content: bytes) -> Bible:
    """Reads a published file.

    Raises ValueError, with the path, if a file is not in the format of its name's ending, or has no
    verse of BOOKS.
    """
    parse = _of_xml if path.endswith(".xml") else _of_table
    verses: Verses = {}
    other_books: set[str] = set()
    try:
        for book, chapter, verse, text in parse(content):
            if book in BOOKS:
                reference = Reference(BOOKS[book], int(chapter), int(verse))
                verses[reference] = unicodedata.normalize("NFC", text)
            else:
                other_books.add(book)
    except (UnicodeDecodeError, ElementTree.ParseError, csv.Error, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None

    if not verses:
        raise ValueError(f"{path}: no verse of a known book")
    return Bible(verses, tuple(sorted(other_books)))


def _of_table(content: bytes) -> Iterator[tuple[str, str, str, str]]:
    """Yields book, chapter, verse and text of each row."""
    rows = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""))
    header = next(rows, [])
    if header != _HEADER:
        raise ValueError(f"expected the columns {','.join(_HEADER)}, got {','.join(header)[:60]!r}")
    for row in rows:
        if len(row) != len(_HEADER):
            raise ValueError(f"expected {len(_HEADER)} columns, got the row {row}")
        book, chapter, verse, text = row
        yield book, chapter, verse, text


def _of_xml(content: bytes) -> Iterator[tuple[str, str, str, str]]:
    """Yields book, chapter, verse and text of each verse; an unknown book is named by its code."""
    for element in ElementTree.fromstring(content).iter("seg"):
        match = _VERSE_ID.fullmatch(element.get("id", ""))
        if match is not None:
            code, chapter, verse = match.groups()
            yield _NAMES_BY_CODE.get(code, code), chapter, verse, "".join(element.itertext())
