"""What a core's memory holds during a training step, split as in Figure 7."""

from __future__ import annotations

import dataclasses
import enum
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

# In the compiler's refusal: `Used 16.50G of 15.48G hbm`, or of the temporaries alone; then its
# largest buffers.
_USED = re.compile(r"Used (\S+) of (\S+) hbm|\((\S+)\) exceeds available HBM \((\S+?)\)")
_ALLOCATION = re.compile(
    r"Size: (?P<size>\S+)\n(?:\s+Operator: op_name=\"(?P<op_name>[^\"]*)\".*\n)?"
    r"\s+Shape: (?P<shape>[\w\[\],]+)"
)
_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": GIB, "T": 2.0**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """GiB of one core; Figure 7 with the optimizer's slots apart.

    Attributes:
      capacity: what the compiler leaves to a program.
      replicated_weights: all weights but the experts'.
      expert_weights: those that have a dim E in a layer's stack of experts.
      optimizer_slots: of both.
      temporaries: room for activations and all else that is made during the step.
      peak: the most held at once, with the batch; more than the capacity where the program is
        refused: what the compiler wanted when it gave up. It may be less than the parts' sum:
        temporaries may lie where donated arguments are no longer needed.
    """

    capacity: float
    replicated_weights: float
    expert_weights: float
    optimizer_slots: float
    temporaries: float
    peak: float


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor on one core: GiB, its shape there, and the layer that it comes from."""

    gib: float
    shape: str
    source: str


class Wanted(enum.Enum):
    """What a refusal counts."""

    ALL = "all"
    TEMPORARIES = "temporaries"  # They alone are too large; the compiler goes no further.


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What the compiler says of a program that is too large.

    Attributes:
      gib: wanted of a core.
      wanted: by what.
      buffers: the largest; none of temporaries alone.
    """

    gib: float
    wanted: Wanted
    buffers: tuple[Buffer, ...]


def state_gib(state: NestedMap, partitioning: Partitioning) -> tuple[float, float, float]:
    """GiB on one core of (weights that are no experts', experts' weights, slots)."""
    weights = state.theta.Flatten()
    experts = [spec for spec in weights if _of_experts(spec)]
    others = [spec for spec in weights if not _of_experts(spec)]
    return (
        _gib(others, partitioning),
        _gib(experts, partitioning),
        _gib(state.slots.Flatten(), partitioning),
    )


def largest(costs: Iterable[Cost], count: int) -> tuple[Buffer, ...]:
    """The largest results of instructions, one for each shape and layer."""
    found = {
        Buffer(num_bytes([each]) / GIB, str(each), categories.source(cost.op_name))
        for cost in costs
        for each in cost.arrays
    }
    return tuple(sorted(found, key=lambda buffer: (-buffer.gib, buffer.source))[:count])


def largest_of_state(
    state: NestedMap, partitioning: Partitioning, count: int
) -> tuple[Buffer, ...]:
    """The largest weights and slots."""
    found = [
        Buffer(
            _gib([spec], partitioning),
            f"{spec.dtype}[{','.join(map(str, partitioning.shard_shape(spec)))}]",
            path,
        )
        for path, spec in NestedMap(theta=state.theta, slots=state.slots).FlattenItems()
    ]
    return tuple(sorted(found, key=lambda buffer: (-buffer.gib, buffer.source))[:count])


def parse_refusal(details: str) -> Refusal:
    """Reads the compiler's message of a program that it refused for want of memory.

    Raises:
      ValueError: it says nothing of how much was wanted.
    """
    used = _USED.search(details)
    if used is None:
        raise ValueError(f"the compiler's refusal is in no known form: {details[:300]}")
    buffers = tuple(
        Buffer(
            _parse_size(found["size"]) / GIB,
            found["shape"],
            categories.source(found["op_name"] or ""),
        )
        for found in _ALLOCATION.finditer(details)
    )
    wanted = Wanted.ALL if used[1] else Wanted.TEMPORARIES
    return Refusal(_parse_size(used[1] or used[3]) / GIB, wanted, buffers)


def _of_experts(spec: TensorSpec) -> bool:
    # The gate's [M, E] is split over nothing, and its dims name no E.
    return "E" in spec.dims


def _gib(specs: Iterable[TensorSpec], partitioning: Partitioning) -> float:
    return (
        sum(
            math.prod(partitioning.shard_shape(spec)) * np.dtype(spec.dtype).itemsize
            for spec in specs
        )
        / GIB
    )


def _parse_size(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([KMGT]?)B?", text).groups()  # type: ignore[union-attr]
    return float(number) * _UNITS[unit]
