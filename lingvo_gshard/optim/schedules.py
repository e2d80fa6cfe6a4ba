"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.late import tf


class SqrtDecay:
    """multiplier / sqrt(max(t, decay_start)); the paper has 1.0 and 10,000 (A.2e).

    A run of fewer steps than that has a constant rate, apart from linear changes at both ends.
    """

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = InstantiableParams(cls)
        p.Define("multiplier", 1.0, "The rate at step 1 if decay_start were 1.")
        p.Define("decay_start", 10_000, "The step at which the decay begins.")
        p.Define("ramp_up_steps", 0, "Steps of a linear rise from zero at the start.")
        p.Define("cool_down_steps", 0, "Steps of a linear fall to zero at the end.")
        p.Define("total_steps", 0, "The step at which the fall ends; 0 without one.")
        return p

    def __init__(self, params: InstantiableParams) -> None:
        self.p = p = params.Copy().Freeze()
        for name in ("multiplier", "decay_start", "ramp_up_steps", "cool_down_steps"):
            value = p.Get(name)
            if value < 0:
                raise ValueError(f"SqrtDecay: {name} must not be negative, got {value}.")

        # Otherwise the fall would begin before the first step.
        if p.cool_down_steps > p.total_steps:
            raise ValueError(
                f"SqrtDecay: cool_down_steps {p.cool_down_steps} must not exceed total_steps "
                f"{p.total_steps}."
            )

    def rate(self, t: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate at step t = 1, 2, ...; both are float32 scalars."""
        p = self.p
        rate = p.multiplier * tf.math.rsqrt(tf.maximum(t, float(p.decay_start)))

        # t begins at 1, so that even the first step has a rate above zero.
        if p.ramp_up_steps:
            rate *= tf.minimum(1.0, t / p.ramp_up_steps)

        # The rate is zero at total_steps, and stays so.
        if p.cool_down_steps:
            steps_left = tf.maximum(float(p.total_steps) - t, 0.0)
            rate *= tf.minimum(1.0, steps_left / p.cool_down_steps)

        return rate
