import collections
import json

from data_prep import report
from data_prep.encoding import Encoded, SideStatistics
from lingvo_gshard.files.digests import File
from lingvo_gshard.input import manifest

_FILE = File("x", 1, "0")


def _language(code, num_pairs, dropped, scripts=("Latn",)):
    shard = manifest.Shard(_FILE, _FILE, num_pairs)
    records = {"train": manifest.Records((shard,), 0, 0, 0)} if num_pairs else {}
    read = num_pairs + sum(dropped.values())
    return manifest.Language(code, records, {}, dropped, 2, scripts, read, num_pairs)


def _write(folder):
    # 90 sentences of 2 pieces, 8 of 5, one of 9 and one of 20, with EOS.
    source = SideStatistics(collections.Counter({2: 90, 5: 8, 9: 1, 20: 1}), 50, 447, 15, 3)
    target = SideStatistics(collections.Counter({4: 100}), 100, 600, 0, 0)
    longer = collections.Counter({4: 90, 5: 8, 9: 1, 20: 1})
    german = (_language("de", 100, {"ratio": 4}), Encoded((), source, target, longer_sides=longer))
    french = (_language("fr", 0, {"empty": 1}), Encoded())
    czech = (_language("cs", 300, {}, ("Cyrl", "Latn")), Encoded((), target, target))
    report.write([german, french, czech], folder)


def test_the_numbers_by_hand(tmp_path):
    _write(tmp_path)
    rows = json.loads((tmp_path / "report.json").read_text())
    # From high to low resource.
    assert [row["code"] for row in rows] == ["cs", "de", "fr"]
    assert rows[1] == {
        "code": "de",
        "scripts": ["Latn"],
        "pairs": {"train": 100, "dev": 0, "test": 0},
        "read": 104,
        "kept": 100,
        "dropped": {"ratio": 4},
        "repaired": 2,
        "escaped": 0,
        # The pair of 20 pieces.
        "longer_than_rows": {
            "16": 0.01,
            **dict.fromkeys(["32", "64", "128", "256", "512", "1024"], 0.0),
        },
        "source": {
            "tokens": 249,
            "mean": 2.49,
            "median": 2,
            "95 %": 5,
            "99 %": 9,
            "longest": 20,
            # 149 pieces without EOS.
            "pieces_per_word": 2.98,
            "characters_per_piece": 3.0,
            "byte_rate": round(15 / 149, 6),
            "unknown_rate": round(3 / 149, 6),
        },
        "target": {
            "tokens": 400,
            "mean": 4.0,
            "median": 4,
            "95 %": 4,
            "99 %": 4,
            "longest": 4,
            "pieces_per_word": 3.0,
            "characters_per_piece": 2.0,
            "byte_rate": 0.0,
            "unknown_rate": 0.0,
        },
    }
    nothing = rows[2]["source"]
    assert set(nothing.values()) == {0}


def test_the_page(tmp_path):
    _write(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert page.startswith(
        "# Prepared data\n\n![training pairs by language](sizes.png)\n\n## Sizes"
    )
    assert "| cs | Cyrl Latn | 300 | 0 | 0 | 400 | 400 |" in page
    assert "| language | empty | ratio | (repaired) |" in page
    assert "| de | 0 | 4 | 2 |" in page
    assert "| language | read | kept | dropped | dropped, % |" in page
    assert "| de | 104 | 100 | 4 | 3.8 |" in page and "| fr | 1 | 0 | 1 | 100.0 |" in page
    assert "| language | 16 |\n| --- | ---: |\n| cs | 0.0 |\n| de | 1.0 |\n" in page
    assert "| de | 2.49 | 2 | 5 | 9 | 20 |" in page
    # At T=1, three of four pairs are Czech.
    assert f"| 1 | {0.75 * 4 + 0.25 * 2.49:.2f} | 4.00 |" in page
    assert "| de | 2.98 | 3.0 | " in page


def test_the_picture_depends_on_the_numbers_alone(tmp_path):
    _write(tmp_path / "one")
    _write(tmp_path / "other")
    picture = (tmp_path / "one/sizes.png").read_bytes()
    assert picture[:4] == b"\x89PNG"
    assert picture == (tmp_path / "other/sizes.png").read_bytes()


def test_a_rule_that_drops_many_is_told_with_what_decides():
    few = _language("de", 968, {"ratio": 2, "duplicate": 30})
    many = _language("sr", 900, {"wrong_script": 95, "empty": 40, "too_long": 5})
    vocabulary = manifest.Vocabulary(_FILE, 30)
    data = manifest.Manifest((few, many), vocabulary, vocabulary, {}, {})
    assert report.many_dropped(data) == [
        "sr: the rule wrong_script dropped 9.1 % of what was read, 95 of 1040: [scripts] names a "
        "language's scripts in place of the survey",
        "sr: the rule empty dropped 3.8 % of what was read, 40 of 1040",
    ]


def test_entities_are_told():
    shard = manifest.Shard(_FILE, _FILE, 100)
    records = {"train": manifest.Records((shard,), 0, 0, 0)}
    vocabulary = manifest.Vocabulary(_FILE, 30)
    languages = []
    for code, escaped in (("de", 2), ("fr", 1)):
        languages.append(manifest.Language(code, records, {}, {}, read=100, escaped=escaped))
    data = manifest.Manifest(tuple(languages), vocabulary, vocabulary, {}, {})
    (told,) = report.many_escaped(data)
    assert told.startswith("de: 2.0 % of what was read has HTML entities, such as &apos;, or marks")
