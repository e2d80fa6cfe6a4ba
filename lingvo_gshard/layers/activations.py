"""The hidden units of a feed-forward layer: an activation, perhaps multiplied by a second product.

relu(wi x) is the paper's (equation 2). With a gate it is Shazeer's GLU (2020, arXiv:2002.05202):
act(wi_gate x) * (wi x), which is GEGLU with GELU and SwiGLU with SILU.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from lingvo_gshard.core.late import tf


class Activation(enum.Enum):
    """An activation of hidden units, element by element."""

    RELU = "relu"
    GELU = "gelu"  # x * Phi(x), with the normal distribution's Phi.
    GELU_TANH = "gelu_tanh"  # Its approximation by a tanh, as in GPT-2 and T5.
    SILU = "silu"  # x * sigmoid(x); also called swish.

    def apply(self, x: tf.Tensor) -> tf.Tensor:
        """Applies the activation to a tensor of any shape; the result has its dtype."""
        match self:
            case Activation.RELU:
                return tf.nn.relu(x)
            case Activation.GELU:
                return tf.nn.gelu(x)
            case Activation.GELU_TANH:
                return tf.nn.gelu(x, approximate=True)
            case Activation.SILU:
                return tf.nn.silu(x)


def hidden_units(
    activation: Activation, gated: bool, project: Callable[[str], tf.Tensor]
) -> tf.Tensor:
    """Returns the hidden units of a layer.

    `project` multiplies the layer's input by the weight of a name: `wi` or, if gated, `wi_gate`.
    """
    if not gated:
        return activation.apply(project("wi"))
    return activation.apply(project("wi_gate")) * project("wi")
