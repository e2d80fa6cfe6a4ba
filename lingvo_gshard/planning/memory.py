"""What a core's memory holds during a call of a program, split as in Figure 7."""

import dataclasses
import math
import re
from collections.abc import Iterable

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.hlo.hlo_module import num_bytes
from lingvo_gshard.planning import categories
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec

GIB = 2.0**30
_NUM_BUFFERS = 8
# The refusal says `Used 16.50G of 15.48G hbm`, or names temporaries alone; then its buffers.
_USED = re.compile(r"Used (\S+) of \S+ hbm|\((\S+)\) exceeds available HBM")
_ALLOCATION = re.compile(
    r"Size: (?P<size>\S+)\n(?:\s+Operator: op_name=\"(?P<op_name>[^\"]*)\".*\n)?"
    r"\s+Shape: (?P<shape>[\w\[\],]+)"
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """GiB of one core, as in Figure 7 but with the optimizer's slots apart."""

    capacity: float  # What the compiler leaves to a program.
    replicated_weights: float  # All weights but those of experts.
    expert_weights: float  # The weights that have a dim E.
    optimizer_slots: float  # The slots of both.
    temporaries: float  # Activations and whatever else is made during the step.
    # The most held at once, including the batch; of a refused program, what the compiler wanted
    # when it gave up. It may be less than the parts' sum, since temporaries may reuse donated
    # arguments that are no longer needed.
    peak: float


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor on one core: its GiB, its shape there, and the layer that it comes from."""

    gib: float
    shape: str
    source: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The compiler's refusal of a program that is too large."""

    gib: float  # What it needs on a core.
    temporaries_alone: bool  # Whether `gib` is only those, which are too large already.
    buffers: tuple[Buffer, ...]  # The largest, if it is not.


def state_gib(state: NestedMap, partitioning: Partitioning) -> tuple[float, float, float]:
    """The GiB on one core of all weights but experts', of experts' weights, and of the slots."""
    weights = state.theta.Flatten()
    # The gate's [M, E] is replicated, and its dims name no E.
    experts = [spec for spec in weights if "E" in spec.dims]
    others = [spec for spec in weights if "E" not in spec.dims]
    slots = state.slots.Flatten()
    return _gib(others, partitioning), _gib(experts, partitioning), _gib(slots, partitioning)


def largest(costs: Iterable[Cost]) -> tuple[Buffer, ...]:
    """The largest results of instructions, one for each shape and layer."""
    buffers = {
        Buffer(num_bytes([each]) / GIB, str(each), categories.source(cost.op_name))
        for cost in costs
        for each in cost.arrays
    }
    return _largest(buffers)


def largest_of_state(state: NestedMap, partitioning: Partitioning) -> tuple[Buffer, ...]:
    """The largest weights and slots."""
    buffers = []
    for path, spec in NestedMap(theta=state.theta, slots=state.slots).FlattenItems():
        shape = ",".join(map(str, partitioning.shard_shape(spec)))
        buffers.append(Buffer(_gib([spec], partitioning), f"{spec.dtype}[{shape}]", path))
    return _largest(buffers)


def parse_refusal(details: str) -> Refusal:
    """Reads the compiler's refusal of too large a program; ValueError if it has no known form."""
    used = _USED.search(details)
    if used is None:
        raise ValueError(f"the compiler's message about memory is not understood: {details[:300]}")
    buffers = [
        Buffer(_parse_gib(found["size"]), found["shape"], categories.source(found["op_name"] or ""))
        for found in _ALLOCATION.finditer(details)
    ]
    largest = tuple(buffers[:_NUM_BUFFERS])
    return Refusal(_parse_gib(used[1] or used[2]), not used[1], largest)


def _largest(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.gib, buffer.source))[:_NUM_BUFFERS])


def _gib(specs: Iterable[TensorSpec], partitioning: Partitioning) -> float:
    shards = ((math.prod(partitioning.shard_shape(spec)), spec.dtype) for spec in specs)
    return sum(size * np.dtype(dtype).itemsize for size, dtype in shards) / GIB


def _parse_gib(size: str) -> float:
    """Reads a number of bytes such as `512`, `16.50G` or `17.02GB`."""
    number = size.rstrip("BKMGT")
    unit = size[len(number) :] or "B"
    return float(number) * 1024.0 ** ("BKMGT".index(unit[0]) - 3)
