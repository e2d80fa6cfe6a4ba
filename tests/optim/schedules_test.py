"""Learning rates at chosen steps."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.optim.schedules import SqrtDecay


def _rates(steps, **changes):
    schedule = SqrtDecay.Params().Set(**changes).Instantiate()
    return [schedule.rate(tf.constant(float(t))).numpy() for t in steps]


def test_schedule_of_the_paper():
    """1.0 / sqrt(max(t, 10k)): constant for ten thousand steps."""
    got = _rates([1, 100, 10_000, 40_000, 1_000_000])
    np.testing.assert_allclose(got, [0.01, 0.01, 0.01, 0.005, 0.001], rtol=1e-5)


def test_ramp_up_and_cool_down_are_linear():
    changes = {
        "multiplier": 2.0,
        "decay_start": 100,
        "ramp_up_steps": 10,
        "cool_down_steps": 20,
        "total_steps": 120,
    }
    got = _rates([1, 5, 10, 60, 100, 110, 120, 130], **changes)
    decayed = 0.2 * (100 / 110) ** 0.5
    np.testing.assert_allclose(
        got, [0.02, 0.1, 0.2, 0.2, 0.2, 0.5 * decayed, 0, 0], rtol=1e-5, atol=1e-9
    )


def test_cool_down_longer_than_run_is_refused():
    with pytest.raises(ValueError, match="cool_down_steps 30 must not exceed total_steps 20"):
        SqrtDecay.Params().Set(cool_down_steps=30, total_steps=20).Instantiate()


@pytest.mark.parametrize("name", ["multiplier", "decay_start", "ramp_up_steps", "cool_down_steps"])
def test_negative_settings_are_refused(name):
    with pytest.raises(ValueError, match=f"SqrtDecay: {name} must not be negative, got -1"):
        SqrtDecay.Params().Set(**{name: -1}).Instantiate()


def test_optimizer_counts_steps_from_one():
    optimizer = Adafactor.Params()
    optimizer.schedule.Set(decay_start=1)
    assert optimizer.Instantiate().learning_rate(tf.constant(3)) == 0.5
