"""The roofline of a compiled program by category: Figure 8, section 5.2.

The roofline is the time of a call if some resource were always at its peak. All times are seconds
of one core in one call, which in training is a step. An instruction takes the longer of its compute
and its memory time; collectives take the network's; nothing overlaps.
"""

import collections
import dataclasses
from collections.abc import Iterable

from lingvo_gshard.hlo.collectives import COLLECTIVES
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

    # What a core does by itself. Costs count collectives too, as traffic of the memory.
    peak_flops = generation.peak_flops
    memory_rate = generation.memory_bytes_per_sec
    for instruction in step.costs:
        part = parts.of(instruction)
        instruction_flops = instruction.times * instruction.flops
        times = Times()
        if instruction.opcode.removesuffix("-start") not in COLLECTIVES:
            times = _local_times(instruction, peak_flops, memory_rate)

        flops[part] += instruction_flops
        secs[part] += times
        if is_recomputed(instruction.op_name):
            recomputed_flops += instruction_flops
            recomputed_secs += times

    # What it waits for the others.
    for collective in report.collective_ops:
        collective_secs = collective.times * network.collective_secs(collective)
        part = parts.of(collective)
        times = Times(network=collective_secs, step=collective_secs)
        secs[part] += times
        network_secs[collective.kind] += collective_secs
        if is_recomputed(collective.op_name):
            recomputed_secs += times

    # XLA has no optimal_seconds for GPUs, whose rates in its cost model are 0 here.
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
    )


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
        secs = _local_times(one_run, peak_flops, memory_rate).step
        once_secs.append(secs)
        looped_secs.append(secs * instruction.times)
    return sum(looped_secs) / sum(once_secs)


def _local_times(instruction: Cost, flops_per_sec: float, bytes_per_sec: float) -> Times:
    """Returns the times of all runs of an instruction that is no collective."""
    # Compute and memory traffic overlap within an instruction.
    compute = instruction.times * instruction.flops / flops_per_sec
    memory = instruction.times * instruction.accessed_bytes / bytes_per_sec
    return Times(compute, memory, step=max(compute, memory))
