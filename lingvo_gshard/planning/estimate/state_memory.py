"""The memory of a training state on one core, which follows from its specs and the table."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.planning.plan import GIB, Buffer
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec

NUM_BUFFERS = 8  # How many of the largest a plan lists.


@dataclasses.dataclass(frozen=True)
class StateGib:
    """GiB on one core, split as in Figure 7 but with the slots apart."""

    replicated_weights: float  # All weights but those of experts.
    expert_weights: float
    optimizer_slots: float  # With the moving averages of the weights, if there are any.

    @property
    def total(self) -> float:
        """GiB of weights and slots."""
        return self.replicated_weights + self.expert_weights + self.optimizer_slots


def state_gib(state: NestedMap, partitioning: Partitioning) -> StateGib:
    """Returns the GiB on one core of `state`, the TensorSpecs of `theta` and `slots`.

    It may also have `ema`.
    """
    # The gate's [M, E] is replicated, and its dims name no E.
    weights = state.theta.Flatten()
    experts = [spec for spec in weights if "E" in spec.dims]
    others = [spec for spec in weights if "E" not in spec.dims]

    return StateGib(
        replicated_weights=_gib(others, partitioning),
        expert_weights=_gib(experts, partitioning),
        optimizer_slots=_gib([*state.slots.Flatten(), *_averages(state).Flatten()], partitioning),
    )


def largest_of_state(state: NestedMap, partitioning: Partitioning) -> tuple[Buffer, ...]:
    """Returns the largest weights, slots and moving averages."""
    tensors = NestedMap(theta=state.theta, slots=state.slots, ema=_averages(state))
    buffers = []
    for path, spec in tensors.FlattenItems():
        shape = ",".join(map(str, partitioning.shard_shape(spec)))
        gib = _gib([spec], partitioning)
        buffers.append(Buffer(gib, f"{spec.dtype}[{shape}]", path))
    return largest(buffers)


def largest(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """Returns the largest buffers, the largest first."""
    ranked = sorted(buffers, key=lambda buffer: (-buffer.gib, buffer.source))
    return tuple(ranked[:NUM_BUFFERS])


def _averages(state: NestedMap) -> NestedMap:
    return state.get("ema", NestedMap())


def _gib(specs: Iterable[TensorSpec], partitioning: Partitioning) -> float:
    num_bytes = 0
    for spec in specs:
        elements = math.prod(partitioning.shard_shape(spec))
        num_bytes += elements * np.dtype(spec.dtype).itemsize
    return num_bytes / GIB
