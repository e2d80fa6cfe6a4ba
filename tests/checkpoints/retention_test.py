"""The checkpoints that are kept, and the best one."""

import math

import pytest

from lingvo_gshard.checkpoints import checkpoints
from lingvo_gshard.checkpoints.checkpoints import Best, steps_to_keep
from lingvo_gshard.train.config import train_params

_HOUR = 3600.0


def _every_quarter(steps):
    """Returns the times of checkpoints 1, 2, ..., one every quarter of an hour."""
    return {step: 1e9 + step * _HOUR / 4 for step in range(1, steps + 1)}


def _settings(keep_max, every_n_hours=None):
    return train_params().Set(
        keep_checkpoint_max=keep_max, keep_checkpoint_every_n_hours=every_n_hours
    )


def test_the_newest_are_kept():
    assert steps_to_keep(_every_quarter(9), None, _settings(3)) == {7, 8, 9}
    assert steps_to_keep({}, None, _settings(3)) == set()
    assert steps_to_keep(_every_quarter(9), 4, _settings(None)) == set(range(1, 10))


def test_the_best_is_kept():
    assert steps_to_keep(_every_quarter(9), 4, _settings(2)) == {4, 8, 9}
    assert steps_to_keep(_every_quarter(9), 40, _settings(2)) == {8, 9}


def test_one_of_every_two_hours_is_kept_despite_deletions():
    settings, held = _settings(2, every_n_hours=2.0), {}
    for step, time in _every_quarter(30).items():
        held[step] = time
        held = {s: held[s] for s in steps_to_keep(held, None, settings)}
    assert sorted(held) == [1, 9, 17, 25, 29, 30]


def test_a_clock_that_jumps_deletes_nothing_new():
    settings, held = _settings(1, every_n_hours=2.0), {}
    for step, time in _every_quarter(40).items():
        held[step] = time - (50 * _HOUR if step > 12 else 0)  # The clock was set back by two days.
        stay = steps_to_keep(held, None, settings)
        assert step in stay
        held = {s: held[s] for s in stay}
    assert sorted(held) == [1, 9, 13, 21, 29, 37, 40]


def _note(model_dir, step, *args):
    """Records a checkpoint that exists."""
    folder = model_dir / "checkpoints" / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commit_success.txt").touch()
    checkpoints.note_best(model_dir, step, *args)


@pytest.mark.parametrize(("higher", "want"), [(False, 4), (True, 2)])
def test_the_best_is_noted(tmp_path, higher, want):
    assert checkpoints.read_best(tmp_path) is None
    for step, value in ((1, 3.0), (2, 5.0), (3, 3.0), (4, 1.0), (5, 2.0)):
        _note(tmp_path, step, {"nll": value, "step": step}, "nll", higher)
    assert checkpoints.read_best(tmp_path).step == want


def test_a_new_metric_restarts_the_search_and_an_unknown_one_is_refused(tmp_path):
    _note(tmp_path, 1, {"nll": 3.0}, "nll")
    _note(tmp_path, 2, {"error": 9.0}, "error")
    assert checkpoints.read_best(tmp_path) == Best(2, "error", 9.0)
    with pytest.raises(ValueError, match="best by 'bleu': expected one of error, nll"):
        _note(tmp_path, 3, {"nll": 3.0, "error": 1.0, "load_E": [1.0]}, "bleu")
    with pytest.raises(ValueError, match="best by 'load_E': expected one of nll"):
        _note(tmp_path, 3, {"nll": 3.0, "load_E": [1.0]}, "load_E")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 3}', "\x00"])
def test_a_note_that_cannot_be_read_counts_as_absent(tmp_path, content):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/best.json").write_text(content)
    assert checkpoints.read_best(tmp_path) is None
    _note(tmp_path, 3, {"nll": 1.0}, "nll")
    assert checkpoints.read_best(tmp_path).step == 3


@pytest.mark.parametrize("higher", [False, True])
def test_nan_is_never_the_best(tmp_path, higher):
    for step, value in ((1, math.nan), (2, 3.0), (3, math.nan)):
        _note(tmp_path, step, {"nll": value}, "nll", higher)
    assert checkpoints.read_best(tmp_path) == Best(2, "nll", 3.0)


def test_a_note_without_its_checkpoint_is_written_over(tmp_path):
    """A save failed, or the checkpoint was deleted while another process evaluated it."""
    _note(tmp_path, 2, {"nll": 3.0}, "nll")
    checkpoints.note_best(tmp_path, 5, {"nll": 1.0}, "nll")
    assert checkpoints.read_best(tmp_path).step == 5
    _note(tmp_path, 7, {"nll": 2.0}, "nll")
    assert checkpoints.read_best(tmp_path) == Best(7, "nll", 2.0)
