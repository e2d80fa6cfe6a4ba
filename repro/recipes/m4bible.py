"""Makes the folder `m4bible`: verses of 71 languages with their English, from published Bibles.

    python -m repro.recipes.m4bible --out=m4bible
    python -m repro.recipes.m4bible --out=m4bible --from=FOLDER

The first command fetches each Bible from a pinned commit of two public repositories by git, which
checks its digest. The fetched files stay in m4bible.sources until the folder is complete, so the
same command continues after an interruption. The second command reads FOLDER/bible_databases and
FOLDER/bible-corpus, which were downloaded before, and does not check digests.
repro/recipes/m4bible.tsv names the files.

Verses are paired by book, chapter and number. Traditions number some chapters differently, so a
chapter counts only if its last verse has the same number as in English. Dev and test are whole
chapters, the same in every language.
"""

import collections
import dataclasses
import itertools
import pathlib
import re
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator

from absl import flags

from data_prep import characters, tsv
from data_prep.tsv import Pair
from lingvo_gshard import cli
from repro.recipes import bibles, m4bible_languages
from repro.recipes.bibles import BOOKS, Reference, Verses
from repro.recipes.git_files import Fetched, Repository
from repro.recipes.m4bible_languages import Language
from xla_spmd.files import atomic_file, lock, table

_OUT = flags.DEFINE_string("out", None, "The folder to make.", required=True)
_FROM = flags.DEFINE_string("from", None, "A folder that has both repositories, unpacked.")

REPOSITORIES = (
    Repository(
        "bible_databases",
        "https://github.com/scrollmapper/bible_databases",
        "a228a19a29099a41c196c2a310cd93e50a390e30",
    ),
    Repository(
        "bible-corpus",
        "https://github.com/christos-c/bible-corpus",
        "44e5fca1bfb369a5da2ee23ebc6f421c88489c5c",
    ),
)
# The Berean Standard Bible (CC0); all others are paired with its 1,189 chapters.
_ENGLISH = ("bible_databases", "formats/csv/BSB.csv")
_NUM_CHAPTERS = 1189

# The held-out chapters: 24 in dev and 24 in test, with 16 of each in the New Testament.
_DEV = """
Genesis 31; Exodus 27; Leviticus 27; I Chronicles 22; Psalms 5, 104; Proverbs 6; Joel 1;
Matthew 24, 25; Mark 5; Luke 2, 21; John 11, 18; Acts 2, 21; Romans 9, 12; I Timothy 1;
Philemon 1; Hebrews 13; I John 2; Revelation of John 18
"""
_TEST = """
Genesis 47; Exodus 14; Deuteronomy 15; II Samuel 3; Psalms 29, 80; Proverbs 8; Daniel 11;
Matthew 9, 12; Mark 8; Luke 4, 5; John 14, 19; Acts 3, 12; I Corinthians 9; II Corinthians 8;
I Timothy 3, 5; Hebrews 9; I John 4; Revelation of John 17
"""

# A training verse repeats a held-out one if they share half of their pairs of words.
_REPEATED_SHARE = 0.5
_FEWEST_BIGRAMS = 5

_MOST_TOKENS = 100
_MOST_CHARACTERS = 400  # For a source without spaces.
_WITHOUT_SPACES = ("zh", "lzh", "ja")
_MOST_RATIO = 6.0
_MOST_RATIO_TO_MEDIAN = 3.0
# Markup, and additions by editors in brackets.
_ADDED = re.compile(r"<[^>]*>|\[[^\]]*\]|\{[^}]*\}|[*†‡¶]")
_HAN_OR_KANA = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")

# Returns the content of a file of a repository.
Read = Callable[[str, str], bytes]


@dataclasses.dataclass(frozen=True)
class Made:
    """The pairs made from a language's file."""

    num_pairs: list[int]  # In train, dev and test.
    other_books: tuple[str, ...]  # Books that were left out, as they are not in BOOKS.


def main() -> None:
    """Makes the folder, and prints the numbers of pairs. Raises ValueError for a user's mistake."""
    out = pathlib.Path(_OUT.value)
    if out.exists():
        raise ValueError(f"--out={out}: it exists already.")

    sources = out.with_name(f"{out.name}.sources")
    with lock.held(sources, "writes this folder"):
        read = _reader(sources, None if _FROM.value is None else pathlib.Path(_FROM.value))
        made = make(m4bible_languages.load(), read, out)
        shutil.rmtree(sources, ignore_errors=True)
    print(counts_table(m4bible_languages.load(), made))


def make(languages: Iterable[Language], read: Read, out: pathlib.Path) -> dict[str, Made]:
    """Writes out/{train,dev,test}/CODE-en.tsv.gz; returns the results by language.

    The folder appears when it is complete. Raises ValueError if a file cannot be read or is
    damaged, or if the English is not a whole Bible.
    """
    english = bibles.read(_ENGLISH[1], read(*_ENGLISH)).verses
    chapters = {(reference.book, reference.chapter) for reference in english}
    if len(chapters) != _NUM_CHAPTERS:
        raise ValueError(f"{_ENGLISH[1]}: expected {_NUM_CHAPTERS} chapters, got {len(chapters)}")
    english = {reference: cleaned(text) for reference, text in english.items()}
    splits = split_verses(english)

    made: dict[str, Made] = {}
    with atomic_file.replacing_folder(out) as partial:
        for language in languages:
            content = read(language.repository, language.file)
            bible = bibles.read(language.file, content)
            pairs = _pairs(bible.verses, english, language.code)
            pairs_by_split = _split_pairs(pairs, splits)
            for split, some_pairs in pairs_by_split.items():
                tsv.write(partial / split / f"{language.code}-en.tsv.gz", some_pairs)
            num_pairs = [len(some_pairs) for some_pairs in pairs_by_split.values()]
            made[language.code] = Made(num_pairs, bible.other_books)
    return made


def counts_table(languages: Iterable[Language], made: dict[str, Made]) -> str:
    """Returns the numbers of pairs beside the ones in quality/results.md, and the unused books."""
    header = ["language", "train", "dev", "test", "results'", "dev", "test", "left out"]
    rows: list[list[object]] = [[*header]]
    for language in languages:
        own = made[language.code]
        other_books = ", ".join(own.other_books) or "-"
        rows.append([language.code, *own.num_pairs, *language.num_pairs, other_books])
    return table.text(rows)


def _reader(sources: pathlib.Path, unpacked: pathlib.Path | None) -> Read:
    """Returns a function that reads files from --from, or fetches them into `sources`."""
    if unpacked is not None:
        for repository in REPOSITORIES:
            if not (unpacked / repository.name).is_dir():
                raise ValueError(f"--from={unpacked}: the folder {repository.name} is missing.")
        print(f"Reading {unpacked}, whose digests are not checked.")
        return lambda repository, path: _read_file(unpacked / repository / path)

    fetched = {
        repository.name: Fetched(repository, sources / repository.name)
        for repository in REPOSITORIES
    }
    return lambda repository, path: fetched[repository].read(path)


def _read_file(path: pathlib.Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    return path.read_bytes()


# --- Pairs ---


def cleaned(text: str) -> str:
    """Returns a verse without markup and additions in brackets, with white space collapsed."""
    return " ".join(_ADDED.sub(" ", text).split())


def _pairs(verses: Verses, english: Verses, code: str) -> dict[Reference, Pair]:
    """Returns the clean pairs of the chapters that are numbered as in English."""
    last_verses = _last_verses(verses)
    english_last_verses = _last_verses(english)
    pairs: dict[Reference, Pair] = {}
    for reference in sorted(verses):
        chapter = (reference.book, reference.chapter)
        if last_verses[chapter] != english_last_verses.get(chapter):
            continue

        # An omitted verse has an empty line in some Bibles and is missing in others.
        source = cleaned(verses[reference])
        if code in _WITHOUT_SPACES:
            source = source.replace(" ", "")
        pair = Pair(source, english.get(reference, ""))
        if _is_good(pair, code):
            pairs[reference] = pair

    # A language's usual length relative to English shows only in many verses.
    if not pairs:
        return pairs
    median = statistics.median(map(_ratio, pairs.values()))
    return {
        reference: pair
        for reference, pair in pairs.items()
        if 1 / _MOST_RATIO_TO_MEDIAN <= _ratio(pair) / median <= _MOST_RATIO_TO_MEDIAN
    }


def _last_verses(verses: Iterable[Reference]) -> dict[tuple[int, int], int]:
    """Returns the number of each chapter's last verse."""
    last: dict[tuple[int, int], int] = collections.defaultdict(int)
    for reference in verses:
        chapter = (reference.book, reference.chapter)
        last[chapter] = max(last[chapter], reference.verse)
    return last


def _is_good(pair: Pair, code: str) -> bool:
    if not pair.source or not pair.english or "\ufffd" in pair.source:
        return False
    if max(len(pair.source.split()), len(pair.english.split())) > _MOST_TOKENS:
        return False
    if code in _WITHOUT_SPACES and len(pair.source) > _MOST_CHARACTERS:
        return False
    return 1 / _MOST_RATIO <= _ratio(pair) <= _MOST_RATIO


def _ratio(pair: Pair) -> float:
    """Returns the source's characters over the English ones; Han and kana count three times."""
    wide = len(_HAN_OR_KANA.findall(pair.source))
    return (len(pair.source) + 2 * wide) / len(pair.english)


# --- Splits ---


def split_verses(english: Verses) -> dict[Reference, str]:
    """Returns the split of each English verse, without verses that repeat held-out ones.

    A training verse is left out if it repeats a verse of dev or test, and a test verse if it
    repeats a verse of dev. So no English of dev or test occurs, or nearly occurs, in another split.
    """
    chapters = {**dict.fromkeys(_chapters(_DEV), "dev"), **dict.fromkeys(_chapters(_TEST), "test")}
    by_split: dict[str, list[Reference]] = {"dev": [], "test": [], "train": []}
    for reference in english:
        split = chapters.get((reference.book, reference.chapter), "train")
        by_split[split].append(reference)

    splits: dict[Reference, str] = {}
    held_out = _Repeats()
    for split, references in by_split.items():
        kept = [reference for reference in references if not held_out.has(english[reference])]
        splits.update(dict.fromkeys(kept, split))
        if split != "train":
            held_out.add(english[reference] for reference in kept)
    return splits


def _split_pairs(
    pairs: dict[Reference, Pair], splits: dict[Reference, str]
) -> dict[str, list[Pair]]:
    """Returns the pairs of each split, without training pairs whose source is held out."""
    by_split: dict[str, list[Pair]] = {"train": [], "dev": [], "test": []}
    for reference, pair in pairs.items():
        if reference in splits:
            by_split[splits[reference]].append(pair)

    held_out = {pair.source for pair in by_split["dev"] + by_split["test"]}
    by_split["train"] = [pair for pair in by_split["train"] if pair.source not in held_out]
    return by_split


def _chapters(text: str) -> Iterator[tuple[int, int]]:
    """Yields the books and chapters in a list such as `Psalms 5, 104; Joel 1`."""
    for book_and_chapters in text.split(";"):
        # The numbers of the chapters follow the last letter.
        book, numbers = re.findall(r"(\w.*[A-Za-z]) ([\d, ]+)", book_and_chapters)[0]
        for number in numbers.split(","):
            yield BOOKS[book], int(number)


class _Repeats:
    """Held-out verses, for finding other verses that repeat them."""

    def __init__(self) -> None:
        self._texts: set[str] = set()
        self._bigrams: list[frozenset[tuple[str, str]]] = []
        self._by_bigram: dict[tuple[str, str], list[int]] = collections.defaultdict(list)

    def add(self, verses: Iterable[str]) -> None:
        for verse in verses:
            words = _words(verse)
            self._texts.add(" ".join(words))
            bigrams = _bigrams(words)
            if len(bigrams) >= _FEWEST_BIGRAMS:
                for bigram in bigrams:
                    self._by_bigram[bigram].append(len(self._bigrams))
                self._bigrams.append(bigrams)

    def has(self, verse: str) -> bool:
        """Returns whether a verse has the words of a held-out one, or half of its word pairs."""
        words = _words(verse)
        if " ".join(words) in self._texts:
            return True
        bigrams = _bigrams(words)
        if len(bigrams) < _FEWEST_BIGRAMS:
            return False

        # Jaccard's index with each held-out verse that shares any pair of words.
        shared = collections.Counter[int]()
        for bigram in bigrams:
            shared.update(self._by_bigram.get(bigram, ()))
        return any(
            count >= _REPEATED_SHARE * (len(bigrams) + len(self._bigrams[index]) - count)
            for index, count in shared.items()
        )


def _words(verse: str) -> list[str]:
    return re.sub(rf"[^{characters.WORD}\s]", "", verse.lower()).split()


def _bigrams(words: list[str]) -> frozenset[tuple[str, str]]:
    return frozenset(itertools.pairwise(words))


if __name__ == "__main__":
    cli.run("m4bible", main)
