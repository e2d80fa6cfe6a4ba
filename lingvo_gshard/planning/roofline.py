"""The roofline of a compiled step (section 5.2): its time if some resource were always at its peak.

All times are seconds of one core in one step. An instruction takes the longer of its compute and
its memory time; collectives take their time on the torus; nothing overlaps.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Iterable

from lingvo_gshard.hlo.collectives import COLLECTIVES, Collective
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.planning.categories import Category, category
from lingvo_gshard.planning.hardware import Generation, Torus


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step, or of a part of it.

    Attributes:
      compute: flops over the peak rate.
      memory: bytes over the memory's bandwidth.
      network: the time of collectives on the torus.
      step: the sum over instructions of the longer of compute and memory time, plus network.
    """

    compute: float
    memory: float
    network: float
    step: float

    def __add__(self, other: Times) -> Times:
        return Times(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


NOTHING = Times(0.0, 0.0, 0.0, 0.0)


def times_by_category(
    costs: Iterable[Cost], collectives: Iterable[Collective], torus: Torus
) -> dict[Category, Times]:
    """Returns the roofline of each category that has instructions."""
    found: dict[Category, Times] = collections.defaultdict(lambda: NOTHING)
    rates = torus.generation.peak_flops, torus.generation.memory_bytes_per_sec
    for cost in costs:
        if cost.opcode.removesuffix("-start") not in COLLECTIVES:
            found[category(cost.op_name)] += _times(cost, *rates)
    for each in collectives:
        assert each.times is not None  # hlo_cost.costs refuses loops of unknown length.
        secs = each.times * torus.collective_secs(each)
        found[category(each.op_name)] += Times(0.0, 0.0, secs, secs)
    return dict(found)


def loop_factor(costs: Iterable[Cost], generation: Generation) -> float:
    """Returns the factor from XLA's optimal_seconds, which run each loop once, to the real ones.

    Both sums take XLA's own rates and count collectives as memory traffic, as XLA does.
    """
    rates = generation.xla_peak_flops, generation.xla_memory_bytes_per_sec
    once = [(_times(dataclasses.replace(cost, times=1), *rates).step, cost) for cost in costs]
    return sum(secs * cost.times for secs, cost in once) / sum(secs for secs, _ in once)


def _times(cost: Cost, flops_per_sec: float, bytes_per_sec: float) -> Times:
    compute = cost.times * cost.flops / flops_per_sec
    memory = cost.times * cost.accessed_bytes / bytes_per_sec
    return Times(compute, memory, 0.0, max(compute, memory))
