"""A weight applied to every token."""

from __future__ import annotations

import tensorflow as tf


def project(x: tf.Tensor, weight: tf.Tensor, num_axes: int = 1) -> tf.Tensor:
    """x's last dims times the weight's first ones: `BLM,MH->BLH`, or `BLND,NDM->BLM` with two.

    One matrix product of all tokens. The gradient of such an einsum would be a product over two
    dims, B and L; for that XLA transposes both its operands on a CPU, a tenth of a train step.

    Args:
      x: float [..., the contracted dims].
      weight: float32 [the contracted dims, ...], cast to x's dtype.
      num_axes: how many dims are contracted.
    """
    return tf.tensordot(x, tf.cast(weight, x.dtype), num_axes, name="project")
