"""Figure 6's table, trend lines and picture."""

import pytest

from lingvo_gshard.evaluation import comparison
from lingvo_gshard.evaluation.comparison import Comparison
from lingvo_gshard.evaluation.quality import LanguageQuality, Quality, Score


def _scores(bleu):
    """Returns scores of BLEU, chrF and chrF++."""
    return Score(bleu, 1.0, "s"), Score(50.0, 1.0, "c"), Score(45.0, 1.0, "w")


def _quality(**bleu):
    """Returns languages by code; each has half as many training pairs as the one before."""
    return Quality(
        tuple(
            LanguageQuality(code, 8000 >> i, 100, *_scores(value))
            for i, (code, value) in enumerate(bleu.items())
        )
    )


_MODELS = {
    "MoE": [_quality(qa=40.0, qb=30.0, qc=25.0)],
    "dense": [_quality(qa=36.0, qb=29.0, qc=10.0)],
}


def test_the_larger_and_the_smaller_half_have_separate_averages():
    models = {"MoE": [_quality(qa=40.0, qb=30.0, qc=25.0, qd=20.0, qe=5.0)]}
    baselines = {"qa": 38.0, "qb": 31.0, "qd": 10.0}
    *_, average, larger, smaller, _ = Comparison(models, baselines).table().splitlines()
    assert average.split() == ["average", "26.33", "24.00", "+3.67"]
    assert larger.split()[2:] == ["34.50", "31.67", "+0.50"]  # Three languages, two baselines.
    assert smaller.split()[2:] == ["10.00", "12.50", "+10.00"]
    assert (larger[:12], smaller[:12]) == ("larger half ", "smaller half")


def test_a_model_has_the_mean_of_its_runs():
    runs = [_quality(qa=40.0, qb=30.0), _quality(qa=37.0, qb=33.5)]
    compared = Comparison({"MoE": runs}, {"qb": 30.5})
    assert compared.scores("MoE") == {"qa": 38.5, "qb": 31.75}
    assert compared.gains("MoE") == {"qb": 1.25}


def test_table_of_another_metric():
    lines = Comparison(_MODELS, {"qb": 40.0}, "chrf").table().splitlines()
    assert lines[2].split() == ["qb", "4000", "40.00", "50.00", "+10.00", "50.00", "+10.00"]
    assert lines[-1] == "sacreBLEU chrf c"


def test_trend_lines_are_means_of_windows():
    ramp = [float(i) for i in range(12)]
    assert comparison.smoothed(ramp, 4) == [0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10]
    assert comparison.smoothed(ramp[:9]) == ramp[:9]  # Fewer than the paper's ten.
    assert sum(comparison.smoothed([0.0] * 6 + [10.0] + [0.0] * 6)) == pytest.approx(10, abs=2)


def _by_tokens(**tokens):
    """Returns languages by code, whose BLEU is 10, 20, ... with these tokens."""
    rows = []
    for i, (code, of_code) in enumerate(tokens.items()):
        bleu = Score(10.0 * (i + 1), 1.0, f"nrefs:1|tok:{of_code}")
        rows.append(LanguageQuality(code, 8000 >> i, 100, bleu, *_scores(0.0)[1:]))
    return Quality(tuple(rows))


def test_languages_of_other_tokens_have_no_average_and_no_trend(tmp_path):
    """The larger half has an average, since its languages are scored by the same tokens."""
    runs = {"MoE": [_by_tokens(qa="13a", qb="13a", ja="char", zh="zh")]}
    compared = Comparison(runs, {"qa": 5.0})
    lines = compared.table().splitlines()
    assert lines[1].split()[2:] == ["5.00", "10.00", "+5.00"]
    assert lines[5].split() == ["average", "-", "-", "-"]
    assert lines[6].split() == ["larger", "half", "5.00", "15.00", "+5.00"]
    assert lines[7].split() == ["smaller", "half", "-", "-", "-"]
    assert [line.rpartition(": ")[2] for line in lines[8:]] == ["qa, qb", "ja", "zh"]
    compared.draw(tmp_path / "figure6.png")


def test_runs_that_were_scored_by_other_tokens_are_not_compared():
    runs = {"MoE": [_by_tokens(ja="char")], "dense": [_by_tokens(ja="ja-mecab-0.996-IPA")]}
    message = "a run of dense has the BLEU of ja by the tokens ja-mecab.*, and another run by char"
    with pytest.raises(ValueError, match=message):
        Comparison(runs, {})


def test_models_of_other_languages_are_not_compared():
    with pytest.raises(
        ValueError, match="first run of MoE and a run of other differ in languages .*: qb, qc"
    ):
        Comparison({"MoE": _MODELS["MoE"], "other": [_quality(qa=1.0)]}, {})
    with pytest.raises(
        ValueError, match="first run of MoE and a run of MoE differ in languages .*: qb, qc"
    ):
        Comparison({"MoE": [*_MODELS["MoE"], _quality(qa=1.0)]}, {})
    with pytest.raises(ValueError, match="baselines for de, xx, which MoE lacks"):
        Comparison(_MODELS, {"qa": 38.0, "xx": 1.0, "de": 2.0})


@pytest.mark.parametrize("baselines", [{}, {"qa": 38.0, "qc": 12.5}])
def test_picture(tmp_path, baselines):
    # A name that is not a valid formula.
    models = {"$^$": _MODELS["MoE"], "dense": _MODELS["dense"]}
    Comparison(models, baselines).draw(tmp_path / "figure6.png")
    data = (tmp_path / "figure6.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
