"""Makes plans: compiles an experiment's training step for a topology and reads the result.

No arrays are made. A plan is kept in its folder, and made again only if the experiment, the code
or the compilers have changed.
"""

import concurrent.futures
import dataclasses
import hashlib
import multiprocessing
import pathlib
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from lingvo_gshard import registry
from lingvo_gshard.core import child_process
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.input import packing
from lingvo_gshard.model import flops, placement
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import compiled_step, hardware, memory, plan, report
from lingvo_gshard.planning.compiled_step import CompiledStep
from lingvo_gshard.planning.memory import GIB, Buffer, Memory, Refusal
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import names_of
from lingvo_gshard.spmd import environment, lowering, program, saved_executable, topology
from lingvo_gshard.train import steps

_NUM_BUFFERS = 8
_FINGERPRINT = "fingerprint"
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to plan: a registered experiment on a topology such as `v3:32x32`.

    `settings` are the changes to the experiment, `path=value`; `params` are the experiment with
    those changes, vocabularies included.
    """

    model: str
    settings: tuple[str, ...]
    params: Params
    topology: str
    partitioning: Partitioning


def request(
    model: str, topology_name: str, settings: Sequence[str], batch_tokens: int | None
) -> Request:
    """A request for an experiment partitioned over all cores as the trainer does it.

    `batch_tokens`, the target tokens of a batch, is a setting too, unless it is None. Raises
    ValueError for an unknown model, setting or topology, if rows do not make up the batch's
    tokens, or if the experts do not lie evenly on the cores.
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
    return Request(model, settings, params, topology_name, parts)


def planned(request: Request, folder: pathlib.Path) -> Plan:
    """The plan kept in `folder`, or a new one that is written there with its report.

    Each plan is made in a process of its own, so that its memory is measured alone and a compiler
    that dies takes no other plan with it. Raises ValueError as `make`, or if that process died.
    """
    fingerprint, kept = _fingerprint(request), folder / _FINGERPRINT
    if kept.is_file() and kept.read_text() == fingerprint:
        return plan.load(folder)
    made = in_own_process(make, request)
    kept.unlink(missing_ok=True)
    plan.save(made, folder)
    report.write(made, folder)
    kept.write_text(fingerprint)  # Last: without it the folder holds no finished plan.
    return made


def make(request: Request) -> Plan:
    """Compiles the experiment's training step for the topology and reads the result.

    Raises ValueError for an unknown topology or one without a compiler, more partitions than
    cores, a vocabulary without a size, groups that do not divide evenly over the cores, or a dim
    that the mesh does not divide.
    """
    params, p, parts = request.params, request.params.input, request.partitioning
    check(params, parts)
    places = topology.places(request.topology)
    generation = hardware.generation(request.topology)
    model = TranslationModel(params, parts)
    started = time.monotonic()
    exported = export(model, params, num_steps=1)
    lowered, lowered_cpu = time.monotonic(), time.process_time()
    compiled = _compile(exported, request.topology)
    compile_secs, compile_cpu_secs = time.monotonic() - lowered, time.process_time() - lowered_cpu
    outcome = compiled if isinstance(compiled, Refusal) else compiled_step.read(compiled)
    if isinstance(outcome, CompiledStep):
        outcome = _unless_too_large(outcome, generation.capacity_gib)
    cost, suspicious = None, tuple[str, ...]()
    if isinstance(outcome, CompiledStep):
        needed = flops.train_step_flops(model.task, p.batch_size, p.source_len, p.target_len)
        network = hardware.network(request.topology, [places[i] for i in parts.mesh.devices])
        cost = compiled_step.cost(outcome, network, needed / parts.num_partitions)
        suspicious = compiled_step.suspicious(outcome, params)
    memory_gib, largest_buffers = _memory(model, generation.capacity_gib, outcome)
    return Plan(
        model=request.model,
        settings=request.settings,
        topology=request.topology,
        mesh=dict(zip(parts.mesh.axis_names, parts.mesh.axis_sizes, strict=True)),
        sharding={letter: "+".join(names_of([axis])) for letter, axis in parts.table},
        cores=parts.num_partitions,
        weights=model.task.num_weights,
        tokens_per_core=p.batch_size * p.target_len / parts.num_partitions,
        fits=cost is not None,
        memory_gib=memory_gib,
        largest_buffers=largest_buffers,
        suspicious=suspicious,
        cost=cost,
        lower_secs=lowered - started,
        compile_secs=compile_secs,
        compile_cpu_secs=compile_cpu_secs,
        host_peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    )


def _batch_setting(model: str, settings: tuple[str, ...], batch_tokens: int) -> str:
    """The setting of as many rows as make up a batch of `batch_tokens`."""
    if any(setting.startswith("input.batch_size=") for setting in settings):
        raise ValueError("give one of --batch_tokens and --set=input.batch_size.")
    length = registry.get_params(model, settings).input.target_len
    if batch_tokens < 1 or batch_tokens % length:
        raise ValueError(
            f"--batch_tokens={batch_tokens}: rows of {length} tokens (input.target_len) "
            "do not make it up; give a multiple."
        )
    return f"input.batch_size={batch_tokens // length}"


def in_own_process(function: Callable[[Request], _Result], request: Request) -> _Result:
    """Calls a function in a process of its own. Raises as the function, or if the process died."""
    context = multiprocessing.get_context("spawn")
    start = child_process.end_with_parent
    with (
        environment.quiet_stderr(),
        concurrent.futures.ProcessPoolExecutor(1, context, start) as pool,
    ):
        try:
            return pool.submit(function, request).result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"{request.model} on {request.topology}: the process that compiled it died; "
                "this machine's memory may be too small."
            ) from error


def _fingerprint(request: Request) -> str:
    """A digest of all that a plan depends on: the request, our code, the compilers."""
    versions = saved_executable.versions([*saved_executable.PACKAGES, "tensorflow"])
    asked = (request.model, request.params.ToText(), request.topology, request.partitioning)
    digest = hashlib.sha256(repr((asked, versions)).encode())
    for path in sorted(pathlib.Path(__file__).parent.parent.glob("*/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check(params: Params, parts: Partitioning) -> None:
    """Refuses vocabularies without a size, and groups that do not divide evenly over the cores."""
    for name in ("source_vocab_size", "target_vocab_size"):
        if params.task.Get(name) is None:
            raise ValueError(
                f"task.{name} is as large as the data's, and a plan has no data; give "
                f"--set=task.{name}=SIZE."
            )
    (ways,) = parts.factor("G")
    for stack, count in placement.num_groups(params).items():
        if count % ways:  # Cores would be idle and tokens gathered.
            raise ValueError(
                f"task.{stack}.moe.group_size divides the batch into {count} groups, which is not "
                f"a multiple of the {ways} cores that share them; choose smaller groups or more "
                "tokens."
            )


def export(model: TranslationModel, params: Params, num_steps: int) -> program.Program:
    """Exports the trainer's program of `num_steps` training steps."""
    p, parts = params.input, model.partitioning
    batch = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    step = steps.train_step(model.model_fn, params)
    return lowering.export(steps.trainer(step, model.state_spec, batch, num_steps, parts), parts)


def _compile(exported: program.Program, name: str) -> topology.TopologyExecutable | Refusal:
    try:
        return topology.compile_program(exported, name)
    except topology.OutOfMemoryError as error:
        return memory.parse_refusal(error.details)


def _unless_too_large(step: CompiledStep, capacity_gib: float) -> CompiledStep | Refusal:
    """Refuses a step in the compiler's place: that of GPUs accepts programs of any size."""
    peak = step.report.peak_bytes / GIB
    if peak <= capacity_gib:
        return step
    return Refusal(peak, False, memory.largest(step.costs, _NUM_BUFFERS))


def _memory(
    model: TranslationModel, capacity_gib: float, outcome: CompiledStep | Refusal
) -> tuple[Memory, tuple[Buffer, ...]]:
    """The memory of one core and its largest buffers."""
    state = memory.state_gib(model.state_spec, model.partitioning)
    if isinstance(outcome, CompiledStep):
        peak, temporaries = outcome.report.peak_bytes / GIB, outcome.report.temp_bytes / GIB
        buffers = memory.largest(outcome.costs, _NUM_BUFFERS)
    else:
        peak = outcome.gib
        temporaries = peak if outcome.temporaries_alone else peak - sum(state)
        buffers = outcome.buffers[:_NUM_BUFFERS] or memory.largest_of_state(
            model.state_spec, model.partitioning, _NUM_BUFFERS
        )
    return Memory(capacity_gib, *state, temporaries, peak), buffers
