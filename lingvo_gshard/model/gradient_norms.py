"""The norms of a step's gradients by layer."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap


def gradient_norms(gradients: NestedMap, weight_specs: NestedMap) -> NestedMap:
    """The norm of all gradients of each layer, float32 scalars. Partitions exchange only scalars.

    They are named `encoder_3` for layer 3 of a stack, `encoder_norm` for a stack's other children,
    and `softmax` for weights outside of stacks. Any gradient that is not finite makes its norm so.
    """
    squares = gradients.Transform(
        lambda gradient, spec: tf.reduce_sum(tf.square(gradient), spec.axes), weight_specs
    )
    groups: dict[str, Any] = {}
    for name, part in squares.items():
        layers = _layers(part) if isinstance(part, NestedMap) else []
        groups |= {f"{name}_{i}": layer for i, layer in enumerate(layers)}
        if layers:
            groups |= {f"{name}_{k}": v for k, v in part.items() if k not in ("layers", "block")}
        else:
            groups[name] = part
    leaves = {name: NestedMap(group=group).Flatten() for name, group in groups.items()}
    return NestedMap({name: tf.add_n(own) ** 0.5 for name, own in leaves.items() if own})


def _layers(stack: NestedMap) -> list[NestedMap]:
    """The layers of a stack, taken apart if it is a loop over blocks; empty if it is no stack."""
    if "block" not in stack:
        return stack.get("layers", [])
    num_blocks = stack.block[0].Flatten()[0].shape[0]
    return [b.Transform(lambda x, i=i: x[i]) for i in range(num_blocks) for b in stack.block]
