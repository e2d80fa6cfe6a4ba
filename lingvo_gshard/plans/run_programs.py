"""The programs of a run: exported as the trainer exports them, compiled for a topology, and read.

One step of training is planned, although the trainer's program is a loop over several steps.
Decoding has a program for each length of sources, and the program of the longest is planned. It
holds the same weights and flat sequence as the others, and more of the source, so they fit if it
does.
"""

import functools
import resource
import time

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import flops, placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import state_memory, topology_executable
from lingvo_gshard.plans.categories import FIGURE_8
from lingvo_gshard.plans.plan import DECODE, INITIALIZE, TRAIN, Plan
from lingvo_gshard.plans.request import Request
from lingvo_gshard.plans.topology_executable import TopologyExecutable
from lingvo_gshard.runs import loss_products
from lingvo_gshard.spmd import tracer
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.train.programs import Programs
from xla_plan.cost import suspicious
from xla_plan.cost.compiled_step import CompiledStep
from xla_plan.machines import networks
from xla_plan.machines.hardware import GIB
from xla_plan.plans import planner
from xla_plan.plans.planner import Reading
from xla_plan.plans.program_plan import Batch, ProgramPlan
from xla_spmd.mesh import names_of


def make_plan(request: Request, is_last: bool = False) -> Plan:
    """Compiles the requested programs and returns their plan.

    If `is_last`, the tracing process is stopped before the last compilation, to free its memory.
    Raises ValueError for an unknown topology, and if the compiler refuses a program for a reason
    other than its memory.
    """
    params = request.params
    partitioning = request.partitioning
    model = TaskModel(params, partitioning)

    # The flops of the mathematics show the useful share of the program's flops.
    step_flops = flops.step_flops(loss_products.of_experiment(params))

    # This takes minutes.
    programs: dict[str, ProgramPlan] = {}
    for name in request.programs:
        is_last_program = is_last and name == request.programs[-1]
        programs[name] = plan_program(name, model, params, request.topology, is_last_program)

    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Plan(
        model=request.model,
        settings=request.settings,
        sharding={letter: "+".join(names_of([axis])) or "-" for letter, axis in partitioning.table},
        weights=model.task.num_weights,
        model_flops_per_core=step_flops / partitioning.mesh.num_partitions,
        host_peak_gib=peak_kib * 1024 / GIB,
        programs=programs,
        bubble=placement.bubble(params),
        unit=model.task.UNIT,
        dispatch=placement.dispatch(params),
        remat=placement.remat(params),
    )


def plan_program(
    name: str, model: TaskModel, params: Params, topology_name: str, is_last: bool = False
) -> ProgramPlan:
    """Compiles a program for a topology and returns its plan.

    If `is_last`, the tracing process is stopped before the compilation, to free its memory. Raises
    ValueError for an unknown topology or mesh, and if the compiler refuses a program for a reason
    other than its memory.
    """
    # Mistakes are found before the compiler takes minutes.
    partitioning = model.partitioning
    network = networks.network(topology_name, partitioning.mesh)

    started = time.monotonic()
    exported = export(name, model, params)
    if is_last:
        tracer.end()  # The compiler needs gigabytes, too.
    lower_secs = time.monotonic() - started

    # Decoding holds only the weights, in the experiment's decoding dtype.
    state = model.state_spec
    if name == DECODE:
        state = NestedMap(theta=model.decoder_spec().theta, slots=NestedMap())
    batch = _batch(name, params)
    return planner.plan(
        planner.Program(
            name=name,
            topology=topology_name,
            mesh=partitioning.mesh,
            network=network,
            compile=lambda: topology_executable.compile_program(exported, topology_name),
            read=functools.partial(_read, name, batch, partitioning.mesh.num_partitions),
            roles=state_memory.by_role(state, partitioning, is_donated=name == TRAIN),
            largest_arguments=state_memory.largest_of_state(state, partitioning),
            batch=batch,
            lower_secs=lower_secs,
        )
    )


def _read(
    name: str, batch: Batch, num_partitions: int, _: TopologyExecutable, step: CompiledStep
) -> Reading:
    """Returns Figure 8's categories, and the signs of a bad partitioning in a compiled program."""
    call = "step" if name == TRAIN else "call"
    return Reading(FIGURE_8, suspicious.describe(step, batch, num_partitions, call))


def export(name: str, model: TaskModel, params: Params, num_steps: int = 1) -> Program:
    """Returns an exported program; a training program runs `num_steps` steps.

    Raises ValueError if the trainer can't export it.
    """
    programs = Programs(model)

    if name == INITIALIZE:
        return programs.initializer()
    if name == DECODE:
        return programs.decoder(params.task.cls.DecodeLength(params.decode))

    if name == TRAIN:
        return programs.exported(Mode.TRAIN, _specs(params.input), num_steps)
    return programs.exported(Mode.EVAL, _specs(params.eval_input))


def _specs(batch: Params) -> NestedMap:
    """Returns the TensorSpecs of a batch from its input."""
    specs: NestedMap = batch.cls.batch_specs(batch)
    return specs


def _batch(name: str, params: Params) -> Batch:
    """Returns the rows that a call of the program takes, no rows for the initializer."""
    if name == INITIALIZE:
        return Batch(0, 0, 0)
    if name == DECODE:
        decode = params.decode
        length = params.task.cls.DecodeLength(decode)
        return Batch(decode.batch_size, length, decode.max_target_len)

    rows = params.input if name == TRAIN else params.eval_input
    return Batch(rows.batch_size, *params.task.cls.Lengths(rows))
