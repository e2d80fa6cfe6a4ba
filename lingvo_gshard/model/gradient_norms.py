"""The norms of a step's gradients by layer."""

from typing import Any

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import stacking


def gradient_norms(gradients: NestedMap, weight_specs: NestedMap) -> NestedMap:
    """The norm of all gradients of each layer. Partitions exchange only scalars.

    Args:
      gradients: float32, in theta's structure.
      weight_specs: WeightSpecs, in theta's structure.

    Returns:
      float32 scalars by name: `encoder_3` for layer 3 of a stack, `encoder_norm` for a stack's
      other children, `softmax` for weights outside of stacks. A norm is not finite if one of its
      gradients is not.
    """
    squares = gradients.Pack(
        tf.reduce_sum(tf.square(gradient), spec.axes)
        for gradient, spec in zip(gradients.Flatten(), weight_specs.Flatten(), strict=True)
    )
    groups: dict[str, Any] = {}
    for name, part in stacking.unstacked(squares).items():
        if isinstance(part, NestedMap) and "layers" in part:
            groups |= {f"{name}_{i}": layer for i, layer in enumerate(part.layers)}
            groups |= {f"{name}_{other}": part[other] for other in part if other != "layers"}
        else:
            groups[name] = part
    leaves = {name: NestedMap(group=group).Flatten() for name, group in groups.items()}
    return NestedMap({name: tf.sqrt(tf.add_n(own)) for name, own in leaves.items() if own})
