"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import abc
import math

from lingvo_gshard.core.configured import Configured
from lingvo_gshard.core.hyperparams import setting
from lingvo_gshard.core.late import tf


class SqrtDecay(Configured):
    """multiplier / sqrt(max(t, decay_start)); the paper has 1.0 and 10,000 (A.2e).

    A run shorter than decay_start has a constant rate, apart from linear changes at both ends.
    """

    class Params(Configured.Params):
        multiplier: float = setting(1.0, "The rate at step 1 if decay_start were 1.")
        decay_start: int = setting(10_000, "The step at which the decay begins.")
        ramp_up_steps: int = setting(0, "Steps of a linear rise from zero at the start.")
        cool_down_steps: int = setting(0, "Steps of a linear fall to zero at the end.")
        total_steps: int = setting(0, "The step at which the fall ends; 0 if there is no fall.")

    p: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        p = self.p
        for name in ("multiplier", "decay_start", "ramp_up_steps", "cool_down_steps"):
            self._check_setting(name, p.Get(name) >= 0, "0 or more")

        # Otherwise the fall would begin before the first step.
        is_long_enough = p.cool_down_steps <= p.total_steps
        expected = f"at most total_steps, {p.total_steps}"
        self._check_setting("cool_down_steps", is_long_enough, expected)

    @property
    def zero_from(self) -> int | None:
        """The step from which the rate is zero; None if it never becomes zero."""
        return self.p.total_steps if self.p.cool_down_steps else None

    def rate(self, t: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate at step t = 1, 2, ...; both are float32 scalars."""
        p = self.p
        rate = p.multiplier * tf.math.rsqrt(tf.maximum(t, float(p.decay_start)))

        # t begins at 1, so that even the first step has a rate above zero.
        if p.ramp_up_steps:
            rate *= tf.minimum(1.0, t / p.ramp_up_steps)

        # The rate is zero from total_steps on.
        if p.cool_down_steps:
            steps_left = tf.maximum(float(p.total_steps) - t, 0.0)
            rate *= tf.minimum(1.0, steps_left / p.cool_down_steps)

        return rate


class _Decay(Configured, abc.ABC):
    """A linear rise to the peak, then a fall that ends at total_steps; constant after that."""

    class Params(Configured.Params):
        peak: float = setting(1e-3, "The rate at the end of the rise.")
        ramp_up_steps: int = setting(0, "Steps of a linear rise from zero at the start.")
        total_steps: int = setting(0, "The step at which the fall ends.")
        final_share: float = setting(0.0, "The rate at the end, as a share of the peak.")

    p: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        p = self.p
        self._check_setting("peak", p.peak >= 0, "0 or more")
        self._check_setting("final_share", 0 <= p.final_share <= 1, "from 0 to 1")
        expected = f"0 or more, and below total_steps, {p.total_steps}"
        self._check_setting("ramp_up_steps", 0 <= p.ramp_up_steps < p.total_steps, expected)

    @abc.abstractmethod
    def _fall(self, done: tf.Tensor) -> tf.Tensor:
        """Returns the remaining height, from 1 to 0, after the share `done` of the fall's steps."""

    @property
    def zero_from(self) -> int | None:
        """The step from which the rate is zero; None if it never becomes zero."""
        return None if self.p.final_share else self.p.total_steps

    def rate(self, t: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate at step t = 1, 2, ...; both are float32 scalars."""
        p = self.p

        # The fall, from 1 to final_share.
        fall_steps = p.total_steps - p.ramp_up_steps
        done = tf.clip_by_value((t - p.ramp_up_steps) / fall_steps, 0.0, 1.0)
        share = p.final_share + (1.0 - p.final_share) * self._fall(done)

        # t begins at 1, so that even the first step has a rate above zero.
        if p.ramp_up_steps:
            share *= tf.minimum(1.0, t / p.ramp_up_steps)
        return p.peak * share


class CosineDecay(_Decay):
    """A linear rise, then half a cosine (Loshchilov and Hutter 2017, equation 5; no restarts)."""

    def _fall(self, done: tf.Tensor) -> tf.Tensor:
        return 0.5 * (1.0 + tf.cos(math.pi * done))


class LinearDecay(_Decay):
    """A linear rise, then a linear fall."""

    def _fall(self, done: tf.Tensor) -> tf.Tensor:
        return 1.0 - done
