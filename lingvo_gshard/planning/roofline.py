"""The roofline of a compiled step: the time of each part if one resource were always at its peak.

Compute, memory and network times are of one core and one step (section 5.2). An instruction takes
the longest of the times that its flops and its bytes need at the peak rates; collectives take
their time on the torus instead; nothing overlaps. The same sum over XLA's own rates, with
collectives as the memory traffic that XLA counts them for, gives its optimal_seconds for programs
with loops, which XLA itself counts once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from lingvo_gshard.hlo.collectives import COLLECTIVES, Collective
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.planning.categories import Category, category
from lingvo_gshard.planning.hardware import Generation, Torus


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds a step of one part, or of all.

    Attributes:
      compute: flops over the peak.
      memory: bytes over the memory's bandwidth.
      network: of its collectives, on the torus.
      step: of each instruction the longer of its compute and memory time, plus network.
    """

    compute: float
    memory: float
    network: float
    step: float

    def __add__(self, other: Times) -> Times:
        return Times(
            self.compute + other.compute,
            self.memory + other.memory,
            self.network + other.network,
            self.step + other.step,
        )


NOTHING = Times(0.0, 0.0, 0.0, 0.0)


def times_by_category(
    costs: Iterable[Cost], collectives: Iterable[Collective], torus: Torus
) -> dict[Category, Times]:
    """The roofline of each category that has any instructions."""
    found: dict[Category, Times] = collections.defaultdict(lambda: NOTHING)
    generation = torus.generation
    for cost in costs:
        if not is_collective(cost):
            found[category(cost.op_name)] += _times(
                cost, generation.peak_flops, generation.memory_bytes_per_sec
            )
    for each in collectives:
        assert each.times is not None  # costs() would have refused.
        secs = each.times * torus.collective_secs(each)
        found[category(each.op_name)] += Times(0.0, 0.0, secs, secs)
    return dict(found)


def total(by_category: dict[Category, Times]) -> Times:
    """The whole step's."""
    return sum(by_category.values(), NOTHING)


def loop_factor(costs: Iterable[Cost], generation: Generation) -> float:
    """What a step's optimal_seconds are, over those of a program whose loops run once."""
    rates = generation.xla_peak_flops, generation.xla_memory_bytes_per_sec
    every = [(_times(dataclasses.replace(cost, times=1), *rates).step, cost) for cost in costs]
    return sum(secs * cost.times for secs, cost in every) / sum(secs for secs, _ in every)


def is_collective(cost: Cost) -> bool:
    """Whether it is one of COLLECTIVES, or the start of one."""
    return cost.opcode.removesuffix("-start") in COLLECTIVES


def _times(cost: Cost, flops_per_sec: float, bytes_per_sec: float) -> Times:
    compute = cost.times * cost.flops / flops_per_sec
    memory = cost.times * cost.accessed_bytes / bytes_per_sec
    return Times(compute, memory, 0.0, max(compute, memory))
