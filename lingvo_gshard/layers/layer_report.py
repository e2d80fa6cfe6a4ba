"""The statistics that a Transformer layer reports of one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from lingvo_gshard.layers.gating import Routing


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """The statistics of one layer and batch.

    Attributes:
      rms: float32 scalar, the root mean square of the layer's output.
      routing: how an MoE layer routed its tokens; None for other layers.
    """

    rms: tf.Tensor
    routing: Routing | None

    def tensors(self) -> list[tf.Tensor]:
        """All fields as a flat list. Only l_aux has a gradient; the others are metrics."""
        tensors = [tf.stop_gradient(self.rms)]
        if self.routing is not None:
            for name, tensor in vars(self.routing).items():
                tensors.append(tensor if name == "aux_loss" else tf.stop_gradient(tensor))
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Iterator[tf.Tensor], *, has_experts: bool) -> LayerReport:
        """Rebuilds a report from the next tensors of the iterator; the inverse of `tensors`."""
        rms, routing = next(tensors), None
        if has_experts:
            routing = Routing(**{f.name: next(tensors) for f in dataclasses.fields(Routing)})
        return cls(rms, routing)
