"""A moving average of the weights, which replaces them in evaluation, decoding and export.

After step t, it is the mean of theta_1, ..., theta_t, each of which weighs d times as much as the
next:

    ema_t = (1 - d) / (1 - d^t) * sum_i d^(t - i) * theta_i
          = ema_(t - 1) + (1 - d) / (1 - d^t) * (theta_t - ema_(t - 1))

Its factors add up to 1 from the first step on, as in Adam's correction of the bias (Kingma and Ba
2015, section 3). So it never depends on the initial weights, and a high d is right for a short run.

A step that is skipped, because its loss or a gradient is not finite, leaves the average unchanged,
as if the step's weights had been the average.
"""

from __future__ import annotations

import math

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.optimizer import slot


def average_specs(weight_specs: NestedMap) -> NestedMap:
    """Returns the TensorSpecs of the averages, which are split like the optimizer's slots."""
    return weight_specs.Transform(lambda spec: slot(spec, range(len(spec.shape))))


def averaged(ema: NestedMap, theta: NestedMap, step: tf.Tensor, decay: float) -> NestedMap:
    """Returns the averages, updated with the weights after one more step; both are float32.

    `step`, an int32 scalar, is the number of earlier steps; `decay` is d, from 0 to below 1.
    """
    if decay == 0.0:
        return theta

    # 1 - d^t would lose its digits where d is close to 1.
    t = tf.cast(step, tf.float32) + 1.0
    rate = (1.0 - decay) / -tf.math.expm1(t * math.log(decay))
    return ema.Transform(lambda average, weight: average + rate * (weight - average), theta)
