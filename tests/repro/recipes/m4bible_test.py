"""The recipe of m4bible on small Bibles with the layout of the published ones."""

import csv
import io
import itertools
import subprocess
from xml.sax import saxutils

import numpy as np
import pytest

from data_prep import tsv
from repro.recipes import bibles, git_files, m4bible, m4bible_languages
from repro.recipes.git_files import Repository
from repro.recipes.m4bible import Made
from repro.recipes.m4bible_languages import Language

# The number of chapters in each book, Genesis to Revelation.
_NUM_CHAPTERS = [
    *(50, 40, 27, 36, 34, 24, 21, 4, 31, 24, 22, 25, 29, 36, 10, 13, 10, 42, 150, 31, 12, 8),
    *(66, 52, 5, 48, 12, 14, 3, 9, 1, 4, 7, 3, 3, 3, 2, 14, 4),
    *(28, 16, 24, 21, 28, 16, 16, 13, 6, 6, 4, 4, 5, 3, 6, 4, 3, 1, 13, 5, 5, 3, 5, 1, 1, 1, 22),
]
_TABLE = "formats/csv/BSB.csv"


def _english():
    """A Bible with three verses in each chapter, all made of different words."""
    rng = np.random.default_rng(1)
    verses = {}
    for book, (name, num_chapters) in enumerate(zip(bibles.BOOKS, _NUM_CHAPTERS, strict=True)):
        for chapter, verse in itertools.product(range(1, num_chapters + 1), (1, 2, 3)):
            words = rng.integers(0, 10**6, 8)
            verses[name, book, chapter, verse] = " ".join(f"w{word}" for word in words)
    return verses


def _table(verses):
    file = io.StringIO(newline="")
    rows = csv.writer(file)
    rows.writerow(["Book", "Chapter", "Verse", "Text"])
    for (name, _, chapter, verse), text in verses.items():
        rows.writerow([name, chapter, verse, text])
    rows.writerow(["Tobit", 1, 1, "An apocryphal verse."])
    return file.getvalue().encode()


def _xml(verses):
    verses = {**verses, ("TOB", 1, 1): "An apocryphal verse."}
    segments = "".join(
        f'<seg id="b.{code}.{chapter}.{verse}" type="verse">\n\t{saxutils.escape(text)}\n</seg>'
        for (code, chapter, verse), text in verses.items()
    )
    return f'<?xml version="1.0"?><cesDoc><text><body>{segments}</body></text></cesDoc>'.encode()


def _source(text):
    return text.replace("w", "q")


_LANGUAGES = [
    Language("de", "bible_databases", "formats/csv/Ger.csv", (1, 1, 1), ""),
    Language("eu", "bible-corpus", "bibles/Basque-NT.xml", (1, 1, 1), ""),
]


def _published():
    """The files of both repositories: the English, another whole Bible, and one with only Mark."""
    english = _english()
    # Repeats: a verse of Genesis 1 has the words of a dev verse, another verse most of them.
    held_out = english["Genesis", 0, 31, 1]
    english["Genesis", 0, 1, 1] = f"{held_out.capitalize()}!"
    english["Genesis", 0, 1, 2] = f"{held_out} more"

    german = {key: f"[Added] <i>{_source(text)}</i>" for key, text in english.items()}
    # Psalm 3 counts its title as a verse, so its numbers differ.
    german["Psalms", 18, 3, 4] = "too many"
    german["Psalms", 18, 4, 2] = ""
    german["Psalms", 18, 4, 3] = "q" * 400
    basque = {
        ("MAR", chapter, verse): _source(english["Mark", 40, chapter, verse])
        for chapter, verse in itertools.product(range(1, 17), (1, 2, 3))
    }
    return {
        ("bible_databases", _TABLE): _table(english),
        ("bible_databases", "formats/csv/Ger.csv"): _table(german),
        ("bible-corpus", "bibles/Basque-NT.xml"): _xml(basque),
    }


@pytest.fixture(scope="module")
def published():
    return _published()


def _read_pairs(folder, split, code):
    return list(tsv.read(folder / split / f"{code}-en.tsv.gz"))


def test_verses_are_paired_cleaned_and_split_by_chapters(published, tmp_path):
    out = tmp_path / "m4bible"
    made = m4bible.make(_LANGUAGES, lambda *key: published[key], out)

    num_train = 3 * 1189 - 2 * 3 * 24
    # Two repeats, a chapter with other numbers, an empty verse, and a verse that is far too long.
    assert made["de"].num_pairs == [num_train - 2 - 3 - 2, 3 * 24, 3 * 24]
    assert made["eu"].num_pairs == [3 * 14, 3, 3]  # Mark has 16 chapters: 5 is in dev, 8 in test.
    assert made["de"].other_books == ("Tobit",)
    assert made["eu"].other_books == ("TOB",)
    english = _english()
    first_of_dev = _read_pairs(out, "dev", "de")[0]
    text = english["Genesis", 0, 31, 1]
    assert first_of_dev == tsv.Pair(_source(text), text)
    assert [pair.english for pair in _read_pairs(out, "test", "eu")] == [
        english["Mark", 40, 8, verse] for verse in (1, 2, 3)
    ]

    # No English verse of dev or test is in train.
    splits = [
        {pair.english.lower().strip("!") for pair in _read_pairs(out, split, "de")}
        for split in ("train", "dev", "test")
    ]
    for some, others in itertools.combinations(splits, 2):
        assert not some & others


def test_the_table_of_languages():
    languages = m4bible_languages.load()
    assert len({language.code for language in languages}) == len(languages) == 71
    sums = [sum(language.num_pairs[i] for language in languages) for i in range(3)]
    assert sums == [733625, 40960, 34622]
    assert {language.file.split(".")[-1] for language in languages} == {"csv", "xml"}
    made = {"de": Made([9, 8, 7], ()), "eu": Made([6, 5, 4], ("TOB",))}
    header, *rows = m4bible.counts_table(_LANGUAGES, made).split("\n")
    assert header.split()[1:] == ["train", "dev", "test", "results'", "dev", "test", "left", "out"]
    assert rows[0].split()[-1] == "-"
    assert rows[1].split() == ["eu", "6", "5", "4", "1", "1", "1", "TOB"]


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        (
            "a.csv",
            b"b,c,v,t\n",
            "a.csv: expected the columns Book,Chapter,Verse,Text, got 'b,c,v,t'",
        ),
        ("a.csv", b"Book,Chapter,Verse,Text\nMark,x,1,t\n", "a.csv: invalid literal for int"),
        ("a.csv", b"Book,Chapter,Verse,Text\n", "a.csv: no verse of a known book"),
        ("a.xml", b"<a>", "a.xml: no element found"),
    ],
)
def test_another_layout_is_refused_by_the_files_name(path, content, message):
    with pytest.raises(ValueError, match=message):
        bibles.read(path, content)


def test_a_part_of_the_english_is_refused(published, tmp_path):
    few = {**published, ("bible_databases", _TABLE): _table({("Mark", 40, 1, 1): "a"})}
    with pytest.raises(ValueError, match=r"BSB.csv: expected 1189 chapters, got 1"):
        m4bible.make(_LANGUAGES, lambda *key: few[key], tmp_path / "out")
    assert not list(tmp_path.iterdir())


# --- Fetching ---


def _git(folder, *arguments):
    done = subprocess.run(
        ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def _commit(folder, files):
    """A repository with some files, in the form that a server offers."""
    folder.mkdir()
    _git(folder, "init", "--quiet")
    _git(folder, "config", "uploadpack.allowFilter", "true")
    _git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "-m", "files")
    return Repository(folder.name, f"file://{folder}", _git(folder, "rev-parse", "HEAD"))


def test_a_pinned_commit_is_fetched_by_files_that_are_kept(tmp_path):
    repository = _commit(tmp_path / "served", {"a/b.txt": b"old", "c.txt": b"unread"})
    (tmp_path / "served/a/b.txt").write_bytes(b"new")
    _git(tmp_path / "served", "commit", "--quiet", "-am", "changed")

    fetched = git_files.Fetched(repository, tmp_path / "kept")
    assert fetched.read("a/b.txt") == b"old"
    with pytest.raises(ValueError, match=r"commit \w{12} can't be read: .*no.txt.* does not exist"):
        fetched.read("no.txt")

    # The next process continues; files that were not read were not fetched.
    (tmp_path / "served").rename(tmp_path / "gone")
    assert fetched.read("a/b.txt") == b"old"
    with pytest.raises(ValueError, match="served: commit .* can't be read: .*served"):
        fetched.read("c.txt")
    with pytest.raises(ValueError, match="served: commit .* can't be read: .*served"):
        git_files.Fetched(repository, tmp_path / "other")


def test_the_command_from_a_folder_and_from_repositories(published, tmp_path, monkeypatch, capsys):
    files = {}
    for (name, path), content in published.items():
        files.setdefault(name, {})[path] = content
    repositories = [_commit(tmp_path / name, files[name]) for name in files]
    monkeypatch.setattr(m4bible, "REPOSITORIES", tuple(repositories))
    monkeypatch.setattr(m4bible_languages, "load", lambda: _LANGUAGES)

    made = []
    for name, unpacked in (("unpacked", str(tmp_path)), ("fetched", None)):
        monkeypatch.setattr(m4bible, "_FROM", _Flag(unpacked))
        monkeypatch.setattr(m4bible, "_OUT", _Flag(str(tmp_path / name)))
        m4bible.main()
        made.append((tmp_path / name / "train/de-en.tsv.gz").read_bytes())
    assert made[0] == made[1]
    assert not (tmp_path / "fetched.sources").exists()
    printed = capsys.readouterr().out
    assert "whose digests are not checked" in printed and printed.count("eu") == 2

    with pytest.raises(ValueError, match="fetched: it exists already"):
        m4bible.main()
    monkeypatch.setattr(m4bible, "_OUT", _Flag(str(tmp_path / "third")))
    monkeypatch.setattr(m4bible, "_FROM", _Flag(str(tmp_path / "fetched")))
    with pytest.raises(ValueError, match="the folder bible_databases is missing"):
        m4bible.main()


class _Flag:
    def __init__(self, value):
        self.value = value


def test_the_words_of_a_verse_keep_their_marks():
    assert m4bible._words("नदी, किनारा!") == ["नदी", "किनारा"]
    assert m4bible._words("«Bonjou\u0301», he said") == ["bonjou\u0301", "he", "said"]
