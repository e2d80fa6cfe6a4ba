"""The roofline of a compiled program by category: Figure 8, section 5.2.

The roofline is the time of a call if some resource were always at its peak. All times are seconds
of one core in one call, which in training is a step. An instruction takes the longer of its compute
and its memory time; collectives take the network's. Operations that the schedule puts
between the start and the end of a collective overlap with it, and are counted separately; nothing
else overlaps.
"""

import collections
import dataclasses
import types
from collections.abc import Iterable, Mapping

from xla_plan.cost import work
from xla_plan.cost.compiled_step import CompiledStep, sum_by_source
from xla_plan.cost.kinds import Parts
from xla_plan.cost.scopes import Pass, is_attention_kernel, pass_of
from xla_plan.cost.step_cost import ProductRate, StepCost, Times
from xla_plan.machines.hardware import Generation
from xla_plan.machines.networks import Network
from xla_spmd.hlo.collectives import Collective
from xla_spmd.hlo.hlo_cost import Cost
from xla_spmd.hlo.hlo_module import COLLECTIVES


def cost(
    step: CompiledStep,
    network: Network,
    parts: Parts,
    lines: Mapping[str, str] = types.MappingProxyType({}),
) -> StepCost:
    """Returns the cost of one call, split into `parts`, of a program with partitions on `network`.

    `lines` are the users' lines by op_name, where they are known.
    """
    report = step.report
    generation = network.generation
    flops: dict[str, float] = dict.fromkeys(parts.names, 0.0)
    secs: dict[str, Times] = collections.defaultdict(Times)
    secs_by_pass: dict[str, Times] = collections.defaultdict(Times)
    network_secs: dict[str, float] = collections.defaultdict(float)
    attention_secs = 0.0
    recomputed_flops = 0.0

    # The instructions that a core runs by itself.
    idle_network = _IdleNetwork()
    for instruction in step.costs:
        part = parts.of(instruction)
        instruction_flops = instruction.times * instruction.flops
        times = local_times(instruction, generation)
        idle_network.add(instruction, times)

        flops[part] += instruction_flops
        secs[part] += times
        step_pass = pass_of(instruction.op_name)
        secs_by_pass[step_pass] += times
        if is_attention_kernel(instruction):
            attention_secs += times.step
        if step_pass is Pass.RECOMPUTED:
            recomputed_flops += instruction_flops

    # The collectives, in which a core waits for the others.
    overlapped_secs = 0.0
    for collective in report.collective_ops:
        collective_secs = collective.times * network.collective_secs(collective)
        overlapped_secs += idle_network.take(collective, collective_secs)
        part = parts.of(collective)
        times = Times(network=collective_secs, step=collective_secs)
        secs[part] += times
        secs_by_pass[pass_of(collective.op_name)] += times
        network_secs[collective.kind] += collective_secs

    # XLA gives no optimal_seconds for GPUs (our copies of its rates are 0 there), nor for some
    # large programs.
    xla_secs = report.optimal_secs
    xla_looped_secs = xla_secs
    if xla_secs:
        xla_looped_secs *= loop_factor(step.costs, generation)

    least_step_secs = None
    least_flops = None
    if step.by_data:
        least = cost(step.at_least(), network, parts)
        least_step_secs = least.step_secs
        least_flops = sum(least.flops_per_core.values())

    return StepCost(
        collectives=sum_by_source(report.collective_ops, lines),
        flops_per_core=flops,
        roofline_secs=sum(secs.values(), Times()),
        roofline_secs_by_category=dict(secs),
        network_secs_by_kind=dict(network_secs),
        roofline_secs_by_pass=dict(secs_by_pass),
        recomputed_flops_per_core=recomputed_flops,
        xla_optimal_secs=xla_looped_secs,
        xla_optimal_secs_once=xla_secs,
        instructions=report.num_instructions,
        uncounted_loops=step.uncounted_loops,
        uncounted_kernels=step.uncounted_kernels,
        overlapped_secs=overlapped_secs,
        product_rates=_product_rates(step.costs, generation),
        by_data=step.by_data,
        least_step_secs=least_step_secs,
        least_flops_per_core=least_flops,
        attention_secs=attention_secs,
        work=work.sums(step.costs),
    )


def _product_rates(costs: Iterable[Cost], generation: Generation) -> tuple[ProductRate, ...]:
    """Returns the peak rates of products in the order of their flops, the most first."""
    flops = collections.Counter[str]()
    for instruction in costs:
        if instruction.flops:
            flops[instruction.arithmetic] += instruction.times * instruction.flops

    rates = []
    for arithmetic, sum_of_flops in flops.most_common():
        rate = generation.rate(arithmetic)
        rates.append(ProductRate(arithmetic, rate.name, rate.flops_per_sec, sum_of_flops))
    return tuple(rates)


class _IdleNetwork:
    """The time of instructions during which the network is still free to run a collective.

    Each second serves one collective, so the overlap is at most the overlap on a network that runs
    one collective at a time.
    """

    def __init__(self) -> None:
        self._secs: dict[str, float] = {}  # The free time in all runs, by the instruction's name.

    def add(self, instruction: Cost, times: Times) -> None:
        """Adds all the time that an instruction takes."""
        self._secs[instruction.name] = times.step

    def take(self, collective: Collective, wanted_secs: float) -> float:
        """Takes up to `wanted_secs` of the free time beside computation; returns the taken time."""
        taken_secs = 0.0
        for name in collective.beside:
            secs = min(self._secs.get(name, 0.0), wanted_secs - taken_secs)
            if secs > 0:
                self._secs[name] -= secs
                taken_secs += secs
        return taken_secs


def local_times(instruction: Cost, generation: Generation) -> Times:
    """Returns the times of all runs of an instruction that a core runs alone; 0 for a collective.

    Costs count collectives too, as traffic of the memory, which the network's time covers.
    """
    if instruction.opcode.removesuffix("-start") in COLLECTIVES:
        return Times()
    rate = generation.rate(instruction.arithmetic)
    return _times_at(instruction, rate.flops_per_sec, generation.memory_bytes_per_sec)


def loop_factor(costs: Iterable[Cost], generation: Generation) -> float:
    """Returns the factor that corrects XLA's optimal_seconds, which count each loop's body once.

    Both sums take XLA's own rates and count collectives as memory traffic, as XLA does.
    """
    peak_flops = generation.xla_peak_flops
    memory_rate = generation.xla_memory_bytes_per_sec

    # One sum counts each loop's body once, as XLA does; the other counts all of its runs.
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
