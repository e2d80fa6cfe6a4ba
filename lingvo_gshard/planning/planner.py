"""Makes plans: an experiment's training step, compiled for a topology, read. No arrays are made."""

from __future__ import annotations

import collections
import dataclasses
import re
import resource
import time
from collections.abc import Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import gather_sums, hlo_cost, hlo_module
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.input import packing
from lingvo_gshard.layers.moe import group_size
from lingvo_gshard.model import flops
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import hardware, memory, roofline
from lingvo_gshard.planning.categories import Category, category, source
from lingvo_gshard.planning.hardware import Torus
from lingvo_gshard.planning.plan import CollectiveSum, Cost, Plan
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, Mesh, names_of
from lingvo_gshard.spmd import program, topology
from lingvo_gshard.train import steps

_NUM_BUFFERS = 8
# Smaller ones, such as of metrics and of the gate's losses, are not suspicious.
_LARGE_BYTES = 2**20
# Tokens to experts and back, and sums.
_EXPECTED = ("all-to-all", "all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
      model: the experiment's registered name.
      settings: what was changed in it.
      params: the experiment with those changes, vocabularies included.
      topology: such as `v3:32x32`.
      mesh: axes; None for one axis of all the topology's cores.
      table: from letters of dims to axes; None for the experiment's.
    """

    model: str
    settings: tuple[str, ...]
    params: Params
    topology: str
    mesh: Mesh | None = None
    table: tuple[tuple[str, Axis], ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Read:
    """A compiled program, read once; gathered_bytes are of all-reduces by name."""

    report: CompiledReport
    costs: tuple[hlo_cost.Cost, ...]
    gathered_bytes: dict[str, int]


def make(request: Request) -> Plan:
    """Compiles the experiment's training step for the topology and reads what came of it.

    Raises:
      ValueError: unknown topology, no compiler for it, more partitions than cores, a vocabulary
        without a size, groups that can't be dealt to the cores, or a dim that the mesh does not
        divide.
    """
    params = request.params
    _check_vocabularies(params)
    places = topology.chip_places(request.topology)
    generation = hardware.generation(request.topology)
    parts = _partitioning(request, len(places))
    _check_groups(params, parts)
    model, batch = TranslationModel(params, parts), _batch(params)
    started = time.monotonic()
    step = steps.train_step(model.model_fn, params)
    exported = program.export(steps.trainer(step, model.state_spec, batch, 1, parts), parts)
    lowered, lowered_cpu = time.monotonic(), time.process_time()
    compiled = _compile(exported, request.topology)
    compile_secs, compile_cpu_secs = time.monotonic() - lowered, time.process_time() - lowered_cpu

    outcome = compiled if isinstance(compiled, memory.Refusal) else _read(compiled)
    read = outcome if isinstance(outcome, _Read) else None
    torus = _torus(generation, places, parts)
    return Plan(
        model=request.model,
        settings=request.settings,
        topology=request.topology,
        mesh=dict(zip(parts.mesh.axis_names, parts.mesh.axis_sizes, strict=True)),
        sharding={letter: "+".join(names_of([axis])) for letter, axis in parts.table},
        cores=parts.num_partitions,
        weights=model.task.num_weights,
        tokens_per_core=stacks_tokens(params)["decoder"] / parts.num_partitions,
        fits=read is not None,
        memory_gib=_memory(model.state_spec, parts, generation.capacity_bytes, outcome),
        largest_buffers=_largest_buffers(model.state_spec, parts, outcome),
        suspicious=_suspicious(params, read) if read else (),
        cost=_cost(model, params, torus, read) if read else None,
        lower_secs=lowered - started,
        compile_secs=compile_secs,
        compile_cpu_secs=compile_cpu_secs,
        host_peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / memory.GIB,
    )


def stacks_tokens(params: Params) -> dict[str, int]:
    """Tokens of a batch, padding included, that the encoder and the decoder see."""
    p = params.input
    return {"encoder": p.batch_size * p.source_len, "decoder": p.batch_size * p.target_len}


def _check_vocabularies(params: Params) -> None:
    for name in ("source_vocab_size", "target_vocab_size"):
        if params.task.Get(name) is None:
            raise ValueError(
                f"task.{name} is as large as the data's, and a plan has no data; give "
                f"--set=task.{name}=SIZE."
            )


def _check_groups(params: Params, parts: Partitioning) -> None:
    """Tokens of groups that can't be dealt evenly would be gathered, and cores be idle."""
    (ways,) = parts.factor("G")
    for stack, tokens in stacks_tokens(params).items():
        moe = params.task.Get(stack).moe
        if moe is None:
            continue
        size = group_size(moe, tokens)
        if tokens % (size * ways):
            raise ValueError(
                f"task.{stack}.moe.group_size {size} does not divide the batch's {tokens} tokens "
                f"into groups for {ways} cores each alike; choose smaller groups or more tokens."
            )


def _partitioning(request: Request, num_devices: int) -> Partitioning:
    mesh = Mesh.flat(num_devices) if request.mesh is None else request.mesh
    if request.table is None:
        return Partitioning.from_dict(mesh, request.params.sharding)
    return Partitioning(mesh, request.table)


def _batch(params: Params) -> NestedMap:
    p = params.input
    return packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))


def _torus(
    generation: hardware.Generation, places: Sequence[tuple[int, ...]], parts: Partitioning
) -> Torus:
    """The torus of chips at the devices' `places`, with the partitions where the mesh puts them."""
    sizes = tuple(max(along) + 1 for along in zip(*places, strict=True))
    return Torus(generation, sizes, tuple(places[i] for i in parts.mesh.devices))


def _compile(exported: program.Program, name: str) -> topology.TopologyExecutable | memory.Refusal:
    try:
        return topology.compile_program(exported, name)
    except topology.OutOfMemoryError as error:
        return memory.parse_refusal(error.details)


def _read(compiled: topology.TopologyExecutable) -> _Read:
    module = compiled.module
    return _Read(compiled.report(), hlo_cost.costs(module), gather_sums.find(module))


def _memory(
    state: NestedMap,
    parts: Partitioning,
    capacity_bytes: float,
    outcome: _Read | memory.Refusal,
) -> memory.Memory:
    replicated, experts, slots = memory.state_gib(state, parts)
    if isinstance(outcome, memory.Refusal):
        peak = temporaries = outcome.gib
        if outcome.wanted is memory.Wanted.ALL:
            temporaries -= replicated + experts + slots
    else:
        peak = outcome.report.peak_bytes / memory.GIB
        temporaries = outcome.report.temp_bytes / memory.GIB
    return memory.Memory(capacity_bytes / memory.GIB, replicated, experts, slots, temporaries, peak)


def _largest_buffers(
    state: NestedMap, parts: Partitioning, outcome: _Read | memory.Refusal
) -> tuple[memory.Buffer, ...]:
    """Where the compiler names none, those of the state, which it needs besides."""
    if isinstance(outcome, _Read):
        return memory.largest(outcome.costs, _NUM_BUFFERS)
    if outcome.buffers:
        return outcome.buffers[:_NUM_BUFFERS]
    return memory.largest_of_state(state, parts, _NUM_BUFFERS)


def _cost(model: TranslationModel, params: Params, torus: Torus, read: _Read) -> Cost:
    report = read.report
    by_category = roofline.times_by_category(read.costs, report.collective_ops, torus)
    p = params.input
    needed = flops.train_step_flops(model.task, p.batch_size, p.source_len, p.target_len)
    products = dict.fromkeys(Category, 0.0)
    for cost in read.costs:
        products[category(cost.op_name)] += cost.times * cost.flops
    return Cost(
        collectives=_sums(report.collective_ops),
        flops_per_core={each.value: count for each, count in products.items()},
        model_flops_per_core=needed / model.partitioning.num_partitions,
        roofline_secs=roofline.total(by_category),
        roofline_secs_by_category={each.value: secs for each, secs in by_category.items()},
        network_secs_by_kind=_network_secs(report.collective_ops, torus),
        xla_optimal_secs=report.optimal_secs * roofline.loop_factor(read.costs, torus.generation),
        xla_optimal_secs_once=report.optimal_secs,
        instructions=report.num_instructions,
    )


def _network_secs(ops: Sequence[Collective], torus: Torus) -> dict[str, float]:
    secs: dict[str, float] = collections.defaultdict(float)
    for op in ops:
        assert op.times is not None  # hlo_cost.costs would have refused.
        secs[op.kind] += op.times * torus.collective_secs(op)
    return dict(secs)


def _sums(ops: Sequence[Collective]) -> tuple[CollectiveSum, ...]:
    """One record for each kind and source, the most bytes first."""
    counts, sizes = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    for op in ops:
        assert op.times is not None  # hlo_cost.costs would have refused.
        key = op.kind, source(op.op_name)
        counts[key] += op.times
        sizes[key] += op.times * op.result_bytes
    sums = [CollectiveSum(key[0], counts[key], sizes[key], key[1]) for key in counts]
    return tuple(sorted(sums, key=lambda each: -each.bytes))


def _suspicious(params: Params, read: _Read) -> tuple[str, ...]:
    """What should not be in a well partitioned program, in words."""
    gathered = {
        (each.kind, each.source): each.bytes
        for each in _sums(read.report.collective_ops)
        if each.kind not in _EXPECTED
    }
    gathered |= {
        ("all-reduce in place of an all-gather", name): size
        for name, size in _summed_bytes(read).items()
    }
    gathers = [
        f"{kind} of {size / 2**20:.1f} MiB a step from {name}"
        for (kind, name), size in gathered.items()
        if size >= _LARGE_BYTES
    ]
    p = params.input
    whole = re.compile(rf"\[(\d+,)*{p.batch_size},({p.source_len}|{p.target_len})[,\]]")
    unsharded = [
        f"{each}, the whole batch on every core, from {source(cost.op_name)}"
        for cost in read.costs
        for each in cost.arrays
        if whole.search(str(each)) and hlo_module.num_bytes([each]) >= _LARGE_BYTES
    ]
    return tuple(dict.fromkeys([*gathers, *unsharded]))


def _summed_bytes(read: _Read) -> collections.Counter[str]:
    """Bytes a step that all-reduces gather, by source."""
    found = collections.Counter[str]()
    for cost in read.costs:
        if cost.name in read.gathered_bytes:
            found[source(cost.op_name)] += cost.times * read.gathered_bytes[cost.name]
    return found
