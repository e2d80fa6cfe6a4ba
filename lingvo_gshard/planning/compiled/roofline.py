"""The roofline of a compiled program by category: Figure 8, section 5.2.

The roofline is the time of a call if some resource were always at its peak. All times are seconds
of one core in one call, which in training is a step. An instruction takes the longer of its compute
and its memory time; collectives take the network's. What the schedule puts between the start and
the end of a collective overlaps with it, and is counted separately; nothing else overlaps.
"""

import collections
import dataclasses
from collections.abc import Iterable

from lingvo_gshard.hlo.collectives import COLLECTIVES, Collective
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.planning.compiled.categories import FIGURE_8, Parts, is_recomputed
from lingvo_gshard.planning.compiled.compiled_step import CompiledStep, sum_by_source
from lingvo_gshard.planning.estimate.hardware import Generation
from lingvo_gshard.planning.estimate.networks import Network
from lingvo_gshard.planning.plan import StepCost, Times


def cost(step: CompiledStep, network: Network, parts: Parts = FIGURE_8) -> StepCost:
    """Returns the cost of a call of a program whose partitions lie on `network`, by `parts`."""
    report = step.report
    generation = network.generation
    flops: dict[str, float] = dict.fromkeys(parts.names, 0.0)
    secs: dict[str, Times] = collections.defaultdict(Times)
    network_secs: dict[str, float] = collections.defaultdict(float)
    recomputed_flops = 0.0
    recomputed_secs = Times()

    # What a core does by itself.
    idle_network = _IdleNetwork()
    for instruction in step.costs:
        part = parts.of(instruction)
        instruction_flops = instruction.times * instruction.flops
        times = local_times(instruction, generation)
        idle_network.add(instruction, times)

        flops[part] += instruction_flops
        secs[part] += times
        if is_recomputed(instruction.op_name):
            recomputed_flops += instruction_flops
            recomputed_secs += times

    # What it waits for the others.
    overlapped_secs = 0.0
    for collective in report.collective_ops:
        collective_secs = collective.times * network.collective_secs(collective)
        overlapped_secs += idle_network.take(collective, collective_secs)
        part = parts.of(collective)
        times = Times(network=collective_secs, step=collective_secs)
        secs[part] += times
        network_secs[collective.kind] += collective_secs
        if is_recomputed(collective.op_name):
            recomputed_secs += times

    # XLA has no optimal_seconds for GPUs, whose rates in its cost model are 0 here, nor for some
    # large programs.
    xla_secs = report.optimal_secs
    xla_looped_secs = xla_secs
    if xla_secs:
        xla_looped_secs *= loop_factor(step.costs, generation)

    return StepCost(
        collectives=sum_by_source(report.collective_ops),
        flops_per_core=flops,
        roofline_secs=sum(secs.values(), Times()),
        roofline_secs_by_category=dict(secs),
        network_secs_by_kind=dict(network_secs),
        recomputed_flops_per_core=recomputed_flops,
        recomputed_secs=recomputed_secs,
        xla_optimal_secs=xla_looped_secs,
        xla_optimal_secs_once=xla_secs,
        instructions=report.num_instructions,
        uncounted_loops=step.uncounted_loops,
        uncounted_kernels=step.uncounted_kernels,
        overlapped_secs=overlapped_secs,
    )


class _IdleNetwork:
    """The time of instructions in which the network may still run a collective beside them.

    Collectives share it: what one has taken, no other has. So no more overlaps than on a network
    that runs one collective at a time.
    """

    def __init__(self) -> None:
        self._secs: dict[str, float] = {}  # In all runs, by the instruction's name.

    def add(self, instruction: Cost, times: Times) -> None:
        """Adds all the time that an instruction takes."""
        self._secs[instruction.name] = times.step

    def take(self, collective: Collective, wanted_secs: float) -> float:
        """Returns how much of `wanted_secs` lies beside computation, and takes it."""
        taken_secs = 0.0
        for name in collective.beside:
            secs = min(self._secs.get(name, 0.0), wanted_secs - taken_secs)
            if secs > 0:
                self._secs[name] -= secs
                taken_secs += secs
        return taken_secs


def local_times(instruction: Cost, generation: Generation) -> Times:
    """Returns the times of all runs of an instruction on a core by itself; none of a collective.

    Costs count collectives too, as traffic of the memory, which the network's time covers.
    """
    if instruction.opcode.removesuffix("-start") in COLLECTIVES:
        return Times()
    return _times_at(instruction, generation.peak_flops, generation.memory_bytes_per_sec)


def loop_factor(costs: Iterable[Cost], generation: Generation) -> float:
    """Returns the factor from XLA's optimal_seconds, which run each loop once, to the real ones.

    Both sums take XLA's own rates and count collectives as memory traffic, as XLA does.
    """
    peak_flops = generation.xla_peak_flops
    memory_rate = generation.xla_memory_bytes_per_sec

    # The same sum with each loop's body once, as XLA counts it, and as often as it runs.
    once_secs = []
    looped_secs = []
    for instruction in costs:
        one_run = dataclasses.replace(instruction, times=1)
        secs = _times_at(one_run, peak_flops, memory_rate).step
        once_secs.append(secs)
        looped_secs.append(secs * instruction.times)
    return sum(looped_secs) / sum(once_secs)


def _times_at(instruction: Cost, flops_per_sec: float, bytes_per_sec: float) -> Times:
    """Returns the times of all runs of an instruction at these rates."""
    # Compute and memory traffic overlap within an instruction.
    compute = instruction.times * instruction.flops / flops_per_sec
    memory = instruction.times * instruction.accessed_bytes / bytes_per_sec
    return Times(compute, memory, step=max(compute, memory))
