"""Makes plans: compiles an experiment's training step for a topology and reads the result.

No arrays are made. A plan is kept in its folder, and made again only if the experiment, the code
or the compilers have changed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import multiprocessing
import pathlib
import resource
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool

from lingvo_gshard import registry
from lingvo_gshard.core import child_process
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.input import packing
from lingvo_gshard.layers.moe import group_size
from lingvo_gshard.model import flops, placement
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import compiled_step, hardware, memory, plan, report
from lingvo_gshard.planning.compiled_step import CompiledStep
from lingvo_gshard.planning.hardware import Torus
from lingvo_gshard.planning.memory import GIB, Refusal
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, Mesh, names_of
from lingvo_gshard.spmd import lowering, program, topology
from lingvo_gshard.train import steps

_NUM_BUFFERS = 8
_FINGERPRINT = "fingerprint"
# The packages whose versions decide what a program compiles to.
_PACKAGES = ("jax", "libtpu", "tensorflow")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
      model: the experiment's registered name.
      settings: the changes to the experiment, `path=value`.
      params: the experiment with those changes, vocabularies included.
      topology: a name such as `v3:32x32`.
      mesh: axes; None for one axis over all cores of the topology.
      table: from letters of dims to axes; None for the experiment's own.
    """

    model: str
    settings: tuple[str, ...]
    params: Params
    topology: str
    mesh: Mesh | None = None
    table: tuple[tuple[str, Axis], ...] | None = None


def request(
    model: str, topology_name: str, settings: Sequence[str], batch_tokens: int | None
) -> Request:
    """Returns the request for an experiment partitioned over all cores as the trainer does it.

    Args:
      model: the experiment's registered name.
      topology_name: a name such as `v3:32x32`.
      settings: changes to the experiment, `path=value`.
      batch_tokens: target tokens of a batch; None for the experiment's own batch.

    Raises:
      ValueError: unknown model, setting or topology; rows do not make up the batch's tokens; or
        experts do not lie evenly on the cores.
    """
    settings = tuple(settings)
    if batch_tokens is not None:
        settings += (_batch_setting(model, settings, batch_tokens),)
    params = registry.get_params(model, settings)
    cores = len(topology.devices(topology_name))
    parts = placement.partitioning(params, cores)
    if parts.num_partitions != cores:
        raise ValueError(
            f"--topology={topology_name}: {params.task.encoder.moe.num_experts} experts can't lie "
            f"evenly on its {cores} cores; choose a multiple or a divisor of them."
        )
    return Request(model, settings, params, topology_name, parts.mesh, parts.table)


def planned(request: Request, folder: pathlib.Path) -> Plan:
    """Returns the plan kept in `folder`, or makes it there, with its report.

    Each plan is made in a process of its own, so that its memory is measured alone and a compiler
    that dies takes no other plan with it.

    Raises:
      ValueError: as `make`; or the process that made the plan died.
    """
    fingerprint, kept = _fingerprint(request), folder / _FINGERPRINT
    if kept.is_file() and kept.read_text() == fingerprint:
        return plan.load(folder)
    made = _in_own_process(request)
    folder.mkdir(parents=True, exist_ok=True)
    kept.unlink(missing_ok=True)
    plan.save(made, folder)
    report.write(made, folder)
    kept.write_text(fingerprint)  # Last: without it the folder holds no finished plan.
    return made


def make(request: Request) -> Plan:
    """Compiles the experiment's training step for the topology and reads the result.

    Raises:
      ValueError: unknown topology, no compiler for it, more partitions than cores, a vocabulary
        without a size, groups that do not divide evenly over the cores, or a dim that the mesh
        does not divide.
    """
    params = request.params
    _check_vocabularies(params)
    places = topology.chip_places(request.topology)
    generation = hardware.generation(request.topology)
    parts = _partitioning(request, len(places))
    _check_groups(params, parts)
    model = TranslationModel(params, parts)
    started = time.monotonic()
    exported = _export(model, params)
    lowered, lowered_cpu = time.monotonic(), time.process_time()
    compiled = _compile(exported, request.topology)
    compile_secs, compile_cpu_secs = time.monotonic() - lowered, time.process_time() - lowered_cpu

    outcome = compiled if isinstance(compiled, Refusal) else compiled_step.read(compiled)
    step = outcome if isinstance(outcome, CompiledStep) else None
    return Plan(
        model=request.model,
        settings=request.settings,
        topology=request.topology,
        mesh=dict(zip(parts.mesh.axis_names, parts.mesh.axis_sizes, strict=True)),
        sharding={letter: "+".join(names_of([axis])) for letter, axis in parts.table},
        cores=parts.num_partitions,
        weights=model.task.num_weights,
        tokens_per_core=stacks_tokens(params)["decoder"] / parts.num_partitions,
        fits=step is not None,
        memory_gib=_memory(model, generation.capacity_bytes, outcome),
        largest_buffers=_largest_buffers(model, outcome),
        suspicious=compiled_step.suspicious(step, params) if step else (),
        cost=_cost(step, model, params, _torus(generation, places, parts)) if step else None,
        lower_secs=lowered - started,
        compile_secs=compile_secs,
        compile_cpu_secs=compile_cpu_secs,
        host_peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    )


def stacks_tokens(params: Params) -> dict[str, int]:
    """Returns the tokens of a batch, padding included, for the encoder and the decoder."""
    p = params.input
    return {"encoder": p.batch_size * p.source_len, "decoder": p.batch_size * p.target_len}


def _batch_setting(model: str, settings: tuple[str, ...], batch_tokens: int) -> str:
    """Returns the setting of as many rows as make up a batch of `batch_tokens`."""
    if any(setting.startswith("input.batch_size=") for setting in settings):
        raise ValueError("give one of --batch_tokens and --set=input.batch_size.")
    length = registry.get_params(model, settings).input.target_len
    if batch_tokens < 1 or batch_tokens % length:
        raise ValueError(
            f"--batch_tokens={batch_tokens}: rows of {length} tokens (input.target_len) "
            "do not make it up; give a multiple."
        )
    return f"input.batch_size={batch_tokens // length}"


def _in_own_process(request: Request) -> Plan:
    context = multiprocessing.get_context("spawn")
    start = child_process.end_with_parent
    with concurrent.futures.ProcessPoolExecutor(1, context, start) as pool:
        try:
            return pool.submit(make, request).result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"{request.model} on {request.topology}: the process that made the plan died; "
                "this machine's memory may be too small."
            ) from error


def _fingerprint(request: Request) -> str:
    """Returns a digest of all that a plan depends on: the request, our code, the compilers."""
    library = pathlib.Path(__file__).parent.parent
    paths = sorted(library.glob("*/*.py"))
    asked = [request.model, request.params.ToText(), request.topology]
    asked += [repr(request.mesh), repr(request.table), *map(_version, _PACKAGES)]
    digest = hashlib.sha256()
    for part in [*map(pathlib.Path.read_bytes, paths), *map(str.encode, asked)]:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"  # Whatever needs the package reports that it is missing.


def _check_vocabularies(params: Params) -> None:
    for name in ("source_vocab_size", "target_vocab_size"):
        if params.task.Get(name) is None:
            raise ValueError(
                f"task.{name} is as large as the data's, and a plan has no data; give "
                f"--set=task.{name}=SIZE."
            )


def _check_groups(params: Params, parts: Partitioning) -> None:
    """Refuses groups that do not divide evenly: cores would be idle and tokens gathered."""
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


def _export(model: TranslationModel, params: Params) -> program.Program:
    p, parts = params.input, model.partitioning
    batch = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    step = steps.train_step(model.model_fn, params)
    return lowering.export(steps.trainer(step, model.state_spec, batch, 1, parts), parts)


def _compile(exported: program.Program, name: str) -> topology.TopologyExecutable | Refusal:
    try:
        return topology.compile_program(exported, name)
    except topology.OutOfMemoryError as error:
        return memory.parse_refusal(error.details)


def _torus(
    generation: hardware.Generation, places: Sequence[tuple[int, ...]], parts: Partitioning
) -> Torus:
    """Returns the torus of the chips at `places`, with partitions where the mesh puts them."""
    sizes = tuple(max(coordinates) + 1 for coordinates in zip(*places, strict=True))
    return Torus(generation, sizes, tuple(places[i] for i in parts.mesh.devices))


def _cost(
    step: CompiledStep, model: TranslationModel, params: Params, torus: Torus
) -> plan.StepCost:
    p = params.input
    needed = flops.train_step_flops(model.task, p.batch_size, p.source_len, p.target_len)
    return compiled_step.cost(step, torus, needed / model.partitioning.num_partitions)


def _memory(
    model: TranslationModel, capacity_bytes: float, outcome: CompiledStep | Refusal
) -> memory.Memory:
    replicated, experts, slots = memory.state_gib(model.state_spec, model.partitioning)
    if isinstance(outcome, Refusal):
        peak = temporaries = outcome.gib
        if outcome.wanted is memory.Wanted.ALL:
            temporaries -= replicated + experts + slots
    else:
        peak = outcome.report.peak_bytes / GIB
        temporaries = outcome.report.temp_bytes / GIB
    return memory.Memory(capacity_bytes / GIB, replicated, experts, slots, temporaries, peak)


def _largest_buffers(
    model: TranslationModel, outcome: CompiledStep | Refusal
) -> tuple[memory.Buffer, ...]:
    """Returns the compiler's largest buffers, or those of the state if it names none."""
    if isinstance(outcome, CompiledStep):
        return memory.largest(outcome.costs, _NUM_BUFFERS)
    if outcome.buffers:
        return outcome.buffers[:_NUM_BUFFERS]
    return memory.largest_of_state(model.state_spec, model.partitioning, _NUM_BUFFERS)
