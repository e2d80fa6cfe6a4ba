"""Learning rates at chosen steps."""

import numpy as np
import optax
import pytest
import tensorflow as tf

from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.optim.schedules import CosineDecay, LinearDecay, SqrtDecay


def _rates(steps, kind=SqrtDecay, **changes):
    schedule = kind.Params().Set(**changes).Instantiate()
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
    with pytest.raises(ValueError, match="cool_down_steps must be at most total_steps, 20, got 30"):
        SqrtDecay.Params().Set(cool_down_steps=30, total_steps=20).Instantiate()


@pytest.mark.parametrize("name", ["multiplier", "decay_start", "ramp_up_steps", "cool_down_steps"])
def test_negative_settings_are_refused(name):
    with pytest.raises(ValueError, match=f"SqrtDecay: {name} must be 0 or more, got -1"):
        SqrtDecay.Params().Set(**{name: -1}).Instantiate()


def test_optimizer_counts_steps_from_one():
    optimizer = Adafactor.Params()
    optimizer.schedule.Set(decay_start=1)
    assert optimizer.Instantiate().learning_rate(tf.constant(3)) == 0.5


def _optax_cosine(peak, rise, total, share):
    return optax.warmup_cosine_decay_schedule(0.0, peak, rise, total, share * peak)


def _optax_linear(peak, rise, total, share):
    up = optax.linear_schedule(0.0, peak, rise)
    down = optax.linear_schedule(peak, share * peak, total - rise)
    return optax.join_schedules([up, down], [rise])


@pytest.mark.parametrize(
    ("kind", "oracle"), [(CosineDecay, _optax_cosine), (LinearDecay, _optax_linear)]
)
@pytest.mark.parametrize("final_share", [0.0, 0.1])
def test_rise_and_fall_equal_optax(kind, oracle, final_share):
    changes = {"peak": 0.3, "ramp_up_steps": 7, "total_steps": 40, "final_share": final_share}
    steps = range(1, 45)
    got = _rates(steps, kind, **changes)
    want = [oracle(0.3, 7, 40, final_share)(step) for step in steps]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_the_step_from_which_a_rate_is_zero():
    def zero_from(kind, **changes):
        return kind.Params().Set(**changes).Instantiate().zero_from

    assert zero_from(SqrtDecay, total_steps=9) is None
    assert zero_from(SqrtDecay, total_steps=9, cool_down_steps=2) == 9
    assert zero_from(CosineDecay, total_steps=9) == 9
    assert zero_from(LinearDecay, total_steps=9, final_share=0.1) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak": -1.0}, "peak must be 0 or more, got -1.0"),
        ({"final_share": 1.5}, "final_share must be from 0 to 1, got 1.5"),
        ({"ramp_up_steps": 9}, "ramp_up_steps must be 0 or more, and below total_steps, 9, got 9"),
    ],
)
def test_decays_refuse_settings_out_of_range(changes, message):
    with pytest.raises(ValueError, match=f"LinearDecay: {message}"):
        LinearDecay.Params().Set(total_steps=9).Set(**changes).Instantiate()
