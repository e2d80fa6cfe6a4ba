"""Reads a compiled program: what it computes and sends, its roofline, what looks wrong in it.

The roofline (section 5.2) is the time of a call if some resource were always at its peak. All times
are seconds of one core in one call, which in training is a step. An instruction takes the longer of
its compute and its memory time; collectives take the network's; nothing overlaps.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from lingvo_gshard.hlo import hlo_cost, hlo_module
from lingvo_gshard.hlo.collectives import COLLECTIVES, Collective, gathered_bytes
from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.planning.categories import Category, category, source
from lingvo_gshard.planning.hardware import Generation, Network
from lingvo_gshard.planning.plan import Batch, CollectiveSum, StepCost, Times
from lingvo_gshard.spmd.topology import TopologyExecutable

# Smaller tensors, such as metrics and the gate's losses, are not suspicious.
_LARGE_BYTES = 2**20
# Tokens go to experts and back, and sums are taken.
_EXPECTED = ("all-to-all", "all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled program in numbers, and the cost of each instruction."""

    report: CompiledReport
    costs: tuple[Cost, ...]
    gathered_bytes: dict[str, int]  # See collectives.gathered_bytes.
    uncounted_loops: tuple[str, ...] = ()  # The sources of loops of unknown length.


def read(compiled: TopologyExecutable) -> CompiledStep:
    """Reads the program."""
    module, report = compiled.module, compiled.report()
    uncounted = (
        source(instruction.op_name)
        for computation in module.computations
        for instruction in computation.instructions
        if report.loops.get(instruction.name, 0) is None
    )
    costs, gathered = hlo_cost.costs(module), gathered_bytes(module)
    return CompiledStep(report, costs, gathered, tuple(dict.fromkeys(uncounted)))


def cost(step: CompiledStep, network: Network) -> StepCost:
    """The cost of a call of a program whose partitions lie on `network`."""
    report, generation = step.report, network.generation
    rates = generation.peak_flops, generation.memory_bytes_per_sec
    flops: dict[str, float] = dict.fromkeys(Category, 0.0)
    times: dict[str, Times] = collections.defaultdict(Times)
    network_secs: dict[str, float] = collections.defaultdict(float)
    for each in step.costs:
        part = category(each.op_name)
        flops[part] += each.times * each.flops
        if each.opcode.removesuffix("-start") not in COLLECTIVES:
            times[part] += _local_times(each, *rates)
    for op in report.collective_ops:
        secs = op.times * network.collective_secs(op)
        times[category(op.op_name)] += Times(network=secs, step=secs)
        network_secs[op.kind] += secs
    xla_secs = report.optimal_secs  # 0 for GPUs.
    return StepCost(
        collectives=_sums(report.collective_ops),
        flops_per_core=flops,
        roofline_secs=sum(times.values(), Times()),
        roofline_secs_by_category=dict(times),
        network_secs_by_kind=dict(network_secs),
        xla_optimal_secs=xla_secs and xla_secs * loop_factor(step.costs, generation),
        xla_optimal_secs_once=xla_secs,
        instructions=report.num_instructions,
        uncounted_loops=step.uncounted_loops,
    )


def loop_factor(costs: Iterable[Cost], generation: Generation) -> float:
    """The factor from XLA's optimal_seconds, which run each loop once, to the real ones.

    Both sums take XLA's own rates and count collectives as memory traffic, as XLA does.
    """
    rates = generation.xla_peak_flops, generation.xla_memory_bytes_per_sec
    once = [(_local_times(dataclasses.replace(cost, times=1), *rates).step, cost) for cost in costs]
    return sum(secs * cost.times for secs, cost in once) / sum(secs for secs, _ in once)


def suspicious(step: CompiledStep, batch: Batch, per: str = "step") -> tuple[str, ...]:
    """Describes gathers of large tensors, and tensors of the whole batch on a core, `per` call."""
    gathered = {
        (each.kind, each.source): each.bytes
        for each in _sums(step.report.collective_ops)
        if each.kind not in _EXPECTED
    }
    for each in step.costs:
        if each.name in step.gathered_bytes:
            key = "all-reduce in place of an all-gather", source(each.op_name)
            gathered[key] = gathered.get(key, 0) + each.times * step.gathered_bytes[each.name]
    found = [
        f"{kind} of {size / 2**20:.1f} MiB a {per} from {name}"
        for (kind, name), size in gathered.items()
        if size >= _LARGE_BYTES
    ]
    # Tokens are vectors: a last dim may be a number of tokens by chance.
    whole = re.compile(rf"\[(\d+,)*{batch.rows},({batch.source_len}|{batch.target_len}),")
    found += [
        f"{array}, the whole batch on every core, from {source(each.op_name)}"
        for each in step.costs
        for array in each.arrays
        if whole.search(str(array)) and hlo_module.num_bytes([array]) >= _LARGE_BYTES
    ]
    return tuple(dict.fromkeys(found))


def _sums(ops: Sequence[Collective]) -> tuple[CollectiveSum, ...]:
    """One record for each kind and source, the most bytes first."""
    counts, sizes = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    for op in ops:
        key = op.kind, source(op.op_name)
        counts[key] += op.times
        sizes[key] += op.times * op.result_bytes
    sums = [CollectiveSum(key[0], counts[key], sizes[key], key[1]) for key in counts]
    return tuple(sorted(sums, key=lambda each: -each.bytes))


def _local_times(cost: Cost, flops_per_sec: float, bytes_per_sec: float) -> Times:
    compute = cost.times * cost.flops / flops_per_sec
    memory = cost.times * cost.accessed_bytes / bytes_per_sec
    return Times(compute, memory, step=max(compute, memory))
