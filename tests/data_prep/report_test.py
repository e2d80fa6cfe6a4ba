import collections
import json

from data_prep import report
from data_prep.encoding import Encoded, SideStatistics
from lingvo_gshard.input import manifest
from xla_spmd.files.digests import File

_FILE = File("x", 1, "0")


def _language(code, num_pairs, dropped, scripts=("Latn",)):
    shard = manifest.Shard(_FILE, _FILE, num_pairs)
    records = {"train": manifest.Records((shard,), 0, 0, 0)} if num_pairs else {}
    read = num_pairs + sum(dropped.values())
    return manifest.Language(code, records, {}, dropped, 2, scripts, read, num_pairs)


def _write(folder):
    # 90 sentences of 2 pieces, 8 of 5, one of 9 and one of 20, including EOS.
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
        "mojibake": 0,
        # The pair with 20 pieces.
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
        "target": rows[1]["target"],
    }
    assert (rows[1]["target"]["tokens"], rows[1]["target"]["pieces_per_word"]) == (400, 3.0)
    nothing = rows[2]["source"]
    assert set(nothing.values()) == {0}


def test_the_page(tmp_path):
    _write(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# Prepared data\n\n![training pairs by language](sizes.png)\n")
    for row in (
        "| cs | Cyrl Latn | 300 | 0 | 0 | 400 | 400 |",
        "| language | empty | ratio | (repaired) | (mojibake) |",
        "| de | 104 | 100 | 4 | 3.8 |",
        "| de | 2.49 | 2 | 5 | 9 | 20 |",
        # At T=1, three out of four pairs are Czech.
        f"| 1 | {0.75 * 4 + 0.25 * 2.49:.2f} | 4.00 |",
    ):
        assert row in page


def test_a_rule_that_drops_many_is_reported_with_its_setting():
    few = _language("de", 968, {"ratio": 2, "duplicate": 30})
    many = _language("sr", 900, {"wrong_script": 95, "empty": 40, "too_long": 5})
    vocabulary = manifest.Vocabulary(_FILE, 30)
    data = manifest.Manifest((few, many), vocabulary, vocabulary, {}, {})
    assert report.many_dropped(data) == [
        "sr: the rule wrong_script dropped 9.1 % of the examples read, 95 of 1040: [scripts] sets "
        "a language's scripts in place of the survey",
        "sr: the rule empty dropped 3.8 % of the examples read, 40 of 1040",
    ]


def test_entities_and_wrong_encodings_are_reported():
    shard = manifest.Shard(_FILE, _FILE, 100)
    records = {"train": manifest.Records((shard,), 0, 0, 0)}
    vocabulary = manifest.Vocabulary(_FILE, 30)
    languages = []
    for code, escaped in (("de", 2), ("fr", 1)):
        found = {"escaped": escaped, "mojibake": 3 - escaped}
        languages.append(manifest.Language(code, records, {}, {}, read=100, **found))
    data = manifest.Manifest(tuple(languages), vocabulary, vocabulary, {}, {})
    escaped, decoded = report.warnings(data)
    assert escaped.startswith("de: 2.0 % of the examples read have HTML entities, such as &apos;, ")
    assert decoded.startswith("fr: 2.0 % of the examples read seem to have been decoded with the")
