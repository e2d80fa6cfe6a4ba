"""The tokens that runs need to reach a loss, from their metrics."""

import json

import pytest

from repro.quality import curves
from repro.quality.curves import Curve


def _write_run(folder, losses, steps=50, tokens=10.0):
    """Writes the metrics of a run whose calls have `steps` steps of `tokens` tokens each."""
    folder.mkdir()
    lines = [
        {"step": (i + 1) * steps, "num_steps": steps, "metrics": {"nll": nll, "num_tokens": tokens}}
        for i, nll in enumerate(losses)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "train_metrics.jsonl").write_text(text)
    return folder


def test_a_curve_is_a_moving_mean_over_its_window(tmp_path):
    curve = curves.read(_write_run(tmp_path / "run", [6.0, 4.0, 3.0, 1.0]))
    assert curve == Curve(tokens=(1000.0, 1500.0, 2000.0), nll=(5.0, 3.5, 2.0))


def test_calls_that_do_not_fill_a_window_exactly_make_a_longer_one(tmp_path):
    curve = curves.read(_write_run(tmp_path / "run", [6.0, 4.0, 2.0], steps=70))
    assert curve == Curve(tokens=(1400.0, 2100.0), nll=(5.0, 3.0))


def test_a_run_shorter_than_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="fewer than 100 steps"):
        curves.read(_write_run(tmp_path / "run", [6.0]))


def test_tokens_to_a_loss():
    curve = Curve(tokens=(10.0, 20.0, 30.0), nll=(3.0, 1.0, 2.0))
    assert [curve.tokens_to(loss) for loss in (3.0, 2.0, 0.5)] == [10.0, 20.0, None]
