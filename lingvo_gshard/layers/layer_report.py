"""What a Transformer layer tells of one batch, and that as the tensors that a block gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from lingvo_gshard.layers.gating import Routing


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What a layer tells of one batch.

    Attributes:
      rms: float32 scalar, the root mean square of its output.
      routing: of an MoE layer, else None.
    """

    rms: tf.Tensor
    routing: Routing | None

    def tensors(self) -> list[tf.Tensor]:
        """All of it. All but l_aux are metrics, through which no gradient goes."""
        tensors = [tf.stop_gradient(self.rms)]
        if self.routing is not None:
            for name, tensor in vars(self.routing).items():
                tensors.append(tensor if name == "aux_loss" else tf.stop_gradient(tensor))
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Iterator[tf.Tensor], *, has_experts: bool) -> LayerReport:
        """The report that gave these tensors, which it takes from the iterator."""
        rms, routing = next(tensors), None
        if has_experts:
            routing = Routing(**{f.name: next(tensors) for f in dataclasses.fields(Routing)})
        return cls(rms, routing)
