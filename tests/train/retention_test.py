"""Which checkpoints stay."""

import pytest

from lingvo_gshard.train.retention import Retention

_HOUR = 3600.0


def _every_quarter(steps):
    """Checkpoints of steps 1, 2, ..., one every quarter of an hour."""
    return {step: 1e9 + step * _HOUR / 4 for step in range(1, steps + 1)}


def test_the_newest_stay():
    assert Retention(keep_max=3).kept(_every_quarter(9), best=None) == {7, 8, 9}
    assert Retention(keep_max=3).kept({}, best=None) == set()


def test_the_best_stays_as_long_as_it_is_there():
    assert Retention(keep_max=2).kept(_every_quarter(9), best=4) == {4, 8, 9}
    assert Retention(keep_max=2).kept(_every_quarter(9), best=40) == {8, 9}


def test_one_of_every_two_hours_stays_whatever_was_deleted_between():
    retention, held = Retention(keep_max=2, keep_every_n_hours=2), {}
    for step, time in _every_quarter(30).items():
        held[step] = time
        held = {s: held[s] for s in retention.kept(held, best=None)}
    assert sorted(held) == [1, 9, 17, 25, 29, 30]


def test_a_clock_that_jumps_deletes_nothing_new_and_keeping_goes_on():
    retention, held = Retention(keep_max=1, keep_every_n_hours=2), {}
    for step, time in _every_quarter(40).items():
        held[step] = time - (50 * _HOUR if step > 12 else 0)  # Set back by two days.
        kept = retention.kept(held, best=None)
        assert step in kept
        held = {s: held[s] for s in kept}
    assert sorted(held) == [1, 9, 13, 21, 29, 37, 40]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [({"keep_max": 0}, "keep_max must be 1"), ({"keep_every_n_hours": 0}, "must be more than 0")],
)
def test_numbers_that_keep_nothing_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Retention(**numbers)
