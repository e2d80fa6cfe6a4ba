"""The norms of a step's gradients by layer."""

from __future__ import annotations

import operator
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap


def gradient_norms(gradients: NestedMap, weight_specs: NestedMap) -> NestedMap:
    """Returns the norm of all gradients of each layer, float32 scalars.

    They are named `encoder_3` for layer 3 of a stack, `encoder_norm` for a stack's other children,
    and `softmax` for weights outside of stacks. A gradient that is not finite makes its norm not
    finite. Gradients of weights that take signed steps, or no steps, count as 0.
    """
    # Each gradient is reduced before the sum, so that partitions exchange only scalars.
    squares = gradients.Transform(_sum_of_squares, weight_specs)

    norms = NestedMap()
    for name, group in _groups(squares).items():
        leaves = NestedMap(group=group).Flatten()
        if leaves:  # Layers such as dropout lack weights.
            norms[name] = tf.add_n(leaves) ** 0.5
    return norms


def _sum_of_squares(gradient: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
    if not spec.is_optimized:
        gradient = tf.zeros_like(gradient)
    return tf.reduce_sum(tf.square(gradient), spec.axes)


def _groups(squares: NestedMap) -> dict[str, Any]:
    """Returns the parts of the model that get one norm each: NestedMaps or leaves."""
    groups: dict[str, Any] = {}
    for name, child in squares.items():
        layers = _layers(child) if isinstance(child, NestedMap) else []
        if not layers:
            groups[name] = child
            continue

        for i, layer in enumerate(layers):
            groups[f"{name}_{i}"] = layer
        for stack_child, value in child.items():
            if stack_child not in ("layers", "block"):
                groups[f"{name}_{stack_child}"] = value
    return groups


def _layers(stack: NestedMap) -> list[NestedMap]:
    """Returns a stack's layers, unstacked if it is a loop; empty for any other child."""
    layers = list(stack.get("layers", []))
    if "block" not in stack:
        return layers

    num_blocks = stack.block[0].Flatten()[0].shape[0]
    for i in range(num_blocks):
        for stacked_layer in stack.block:
            layers.append(stacked_layer.Transform(operator.itemgetter(i)))
    return layers
