"""Which checkpoint is the best."""

import math

import pytest

from lingvo_gshard.train import best
from lingvo_gshard.train.best import Best, BestBy, Better


@pytest.mark.parametrize(("better", "want"), [(Better.LOWER, 4), (Better.HIGHER, 2)])
def test_the_best_is_noted(tmp_path, better, want):
    assert best.read(tmp_path) is None
    for step, value in ((1, 3.0), (2, 5.0), (3, 3.0), (4, 1.0), (5, 2.0)):
        best.note(tmp_path, BestBy("nll", better), step, {"nll": value, "step": step})
    assert best.read(tmp_path).step == want


def test_another_metric_starts_anew_and_an_unknown_one_is_refused(tmp_path):
    best.note(tmp_path, BestBy("nll"), 1, {"nll": 3.0})
    best.note(tmp_path, BestBy("error"), 2, {"error": 9.0})
    assert best.read(tmp_path) == Best(2, "error", 9.0)
    with pytest.raises(ValueError, match="best by 'bleu': the metrics are error, nll"):
        best.note(tmp_path, BestBy("bleu"), 3, {"nll": 3.0, "error": 1.0})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 3}', "\x00"])
def test_a_note_that_cannot_be_read_counts_as_absent(tmp_path, content):
    (tmp_path / "best.json").write_text(content)
    assert best.read(tmp_path) is None
    best.note(tmp_path, BestBy("nll"), 3, {"nll": 1.0})
    assert best.read(tmp_path).step == 3


@pytest.mark.parametrize("better", Better)
def test_what_is_no_number_is_never_the_best(tmp_path, better):
    for step, value in ((1, math.nan), (2, 3.0), (3, math.nan)):
        best.note(tmp_path, BestBy("nll", better), step, {"nll": value})
    assert best.read(tmp_path) == Best(2, "nll", 3.0)
