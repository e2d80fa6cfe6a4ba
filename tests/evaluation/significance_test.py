"""The paired bootstrap, compared with sacreBLEU's own, and its files."""

import re

import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from lingvo_gshard.evaluation import quality, significance

_WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "it",
    "rains",
    "all",
    "day",
    "long",
    "so",
    "nobody",
    "goes",
    "out",
]
_REFERENCES = {
    code: [" ".join(_WORDS[(i * step) % 7 :][: 5 + i % 4]) for i in range(30)]
    for code, step in {"aa": 3, "br": 5}.items()
}


def _spoiled(lines, every):
    """Removes the second word of every line whose number is a multiple of `every`."""
    return [
        line if i % every else re.sub(r" \w+", "", line, count=1) for i, line in enumerate(lines)
    ]


def _write(folder, every, references=_REFERENCES):
    folder.mkdir()
    for code, lines in references.items():
        (folder / f"{code}.reference.txt").write_text("\n".join([*lines, ""]))
        translated = _spoiled(_REFERENCES[code], every[code])
        (folder / f"{code}.txt").write_text("\n".join([*translated, ""]))
    return folder


_FIRST, _SECOND = {"aa": 2, "br": 3}, {"aa": 4, "br": 5}


@pytest.fixture
def folders(tmp_path):
    return {"A": [_write(tmp_path / "a", _FIRST)], "B": [_write(tmp_path / "b", _SECOND)]}


def _sacrebleu(code, metric):
    systems = [
        (name, _spoiled(_REFERENCES[code], each[code]))
        for name, each in (("A", _FIRST), ("B", _SECOND))
    ]
    test = PairedTest(systems, {metric: quality.METRICS[metric]()}, [_REFERENCES[code]], "bs")
    signatures, results = test()
    (base, other), (signature,) = list(results.values())[1], signatures.values()
    return base.score, other.score, other.p_value, str(signature)


def test_scores_p_values_and_signature_equal_sacrebleus(folders):
    found = list(significance.tables(folders, ["aa", "br"]))
    assert len(found) == len(quality.available())
    for metric, text in zip(quality.available(), found, strict=True):
        header, *rows, average, signature = text.splitlines()
        assert header.split() == ["language", "A", "B", "gain", "from", "to", "p"]
        for row in rows:
            code, base, other, gain, low, high, p = row.split()
            want_base, want_other, want_p, want_signature = _sacrebleu(code, metric)
            assert float(base) == pytest.approx(want_base, abs=0.0051)
            assert float(other) == pytest.approx(want_other, abs=0.0051)
            assert float(gain) == pytest.approx(want_other - want_base, abs=0.0051)
            assert float(low) < float(gain) < float(high)
            assert float(p) == pytest.approx(want_p, abs=0.00006)
            assert signature == f"sacreBLEU paired {metric} {want_signature}"
        assert average.split()[0] == "average"
        gains = [float(row.split()[3]) for row in rows]
        assert float(average.split()[3]) == pytest.approx(sum(gains) / 2, abs=0.011)


def test_two_languages_settle_what_one_leaves_open(folders):
    """The interval of the mean is narrower than the mean of the intervals."""
    rows = [line.split() for line in next(significance.tables(folders, ["aa", "br"])).splitlines()]
    widths = [float(row[5]) - float(row[4]) for row in rows[1:4]]
    assert widths[2] < (widths[0] + widths[1]) / 2


def test_a_model_has_the_mean_of_its_runs(folders):
    """A's runs are the runs of both models, which leaves half of the gain and of its interval."""
    mixed = {"A": [*folders["A"], *folders["B"]], "B": folders["B"]}
    apart, halved = (
        [
            float(cell)
            for cell in next(significance.tables(each, ["aa"])).splitlines()[1].split()[1:]
        ]
        for each in (folders, mixed)
    )
    assert halved[0] == pytest.approx((apart[0] + apart[1]) / 2, abs=0.01)
    assert halved[2:5] == pytest.approx([each / 2 for each in apart[2:5]], abs=0.01)
    assert halved[5] == apart[5]


def test_a_run_does_not_differ_from_itself(folders):
    rows = next(significance.tables({"A": folders["A"], "B": folders["A"]}, ["aa"])).splitlines()
    for row in rows[1:3]:  # The average does not differ, either.
        assert row.split()[3:] == ["+0.00", "+0.00", "+0.00", "1.0000"]


@pytest.mark.parametrize("num_sentences", [1, 4])
def test_a_gain_without_variance_is_not_tested(tmp_path, num_sentences):
    """Each bootstrap sample has the same gain: for one sentence, or the same sentence repeated."""
    folders = {}
    for name, line in (("A", "the cat sat on a"), ("B", "the cat sat on a mat")):
        folders[name] = [tmp_path / name]
        folders[name][0].mkdir()
        (folders[name][0] / "aa.txt").write_text(f"{line}\n" * num_sentences)
        (folders[name][0] / "aa.reference.txt").write_text("the cat sat on a mat\n" * num_sentences)
    row = next(significance.tables(folders, ["aa"])).splitlines()[1]
    assert row.split()[2] == "100.00" and float(row.split()[3]) > 0
    assert row.split()[4:] == ["-", "-", "-"]


def test_no_sentence_is_refused(folders):
    for name in ("A", "B"):
        for file in ("aa.txt", "aa.reference.txt"):
            (folders[name][0] / file).write_text("")
    with pytest.raises(ValueError, match="a has no sentences of aa"):
        list(significance.tables(folders, ["aa"]))


def test_languages_of_other_tokens_have_no_average(tmp_path):
    """en-th is scored by characters, as in sacreBLEU; chrF is the same in all languages."""
    lines = {"en-th": ["กขคงจฉ", "ชซฌญฎ"], "en-de": _REFERENCES["aa"][:2]}
    folders = {"A": [tmp_path / "a"], "B": [tmp_path / "b"]}
    for name, last in (("a", -1), ("b", None)):
        (tmp_path / name).mkdir()
        for code, texts in lines.items():
            (tmp_path / name / f"{code}.reference.txt").write_text("\n".join([*texts, ""]))
            shortened = [texts[0], texts[1][:last]]
            (tmp_path / name / f"{code}.txt").write_text("\n".join([*shortened, ""]))

    bleu, chrf, *_ = significance.tables(folders, lines)
    _, thai, german, *signatures = bleu.splitlines()
    assert thai.split()[0] == "en-th" and german.split()[0] == "en-de"
    assert [line.rpartition(": ")[2] for line in signatures] == ["en-de", "en-th"]
    assert "tok:13a" in signatures[0] and "tok:char" in signatures[1]
    assert "average" in chrf and "average" not in bleu

    systems = [("A", ["กขคงจฉ", "ชซฌญ"]), ("B", lines["en-th"])]
    test = PairedTest(systems, {"bleu": BLEU(tokenize="char")}, [lines["en-th"]], "bs")
    base, other = list(test()[1].values())[1]
    assert float(thai.split()[1]) == pytest.approx(base.score, abs=0.0051)
    assert float(thai.split()[6]) == pytest.approx(other.p_value, abs=0.00006)


def test_unpaired_results_are_refused(folders, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--paired: A is the only model; add a --run of another"):
        list(significance.tables({"A": folders["A"]}, ["aa"]))
    other = _write(tmp_path / "c", _FIRST, {"aa": ["other"] * 30})
    with pytest.raises(ValueError, match=r"a and .*c differ in references of aa"):
        list(significance.tables(folders | {"B": [*folders["B"], other]}, ["aa"]))
    (folders["B"][0] / "aa.reference.txt").unlink()
    with pytest.raises(ValueError, match="aa.reference.txt; write it with --mode=decode"):
        list(significance.tables(folders, ["aa"]))
    monkeypatch.setenv("SACREBLEU_SEED", "none")
    with pytest.raises(ValueError, match="same sentences for all runs; unset SACREBLEU_SEED"):
        list(significance.tables(folders, ["aa"]))
