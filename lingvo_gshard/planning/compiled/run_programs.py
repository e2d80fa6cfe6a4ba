"""The programs of a run: exported as the trainer exports them, compiled for a topology, and read.

One step of training is planned, where the trainer's program is a loop over several. Decoding has a
program for each length of sources, and the one for the longest is planned. It holds the same
weights and flat sequence as the others and more of the source, so that they fit if it does.
"""

import resource
import time

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.planning.compiled import compiled_step, memory, roofline, suspicious
from lingvo_gshard.planning.compiled.memory import Refusal
from lingvo_gshard.planning.estimate import hardware, networks, state_memory
from lingvo_gshard.planning.plan import (
    DECODE,
    GIB,
    INITIALIZE,
    TRAIN,
    Batch,
    Plan,
    ProgramPlan,
)
from lingvo_gshard.planning.request import Request
from lingvo_gshard.runs.experiment_programs import ExperimentPrograms
from lingvo_gshard.sharding.mesh import names_of
from lingvo_gshard.spmd import topology, tracer
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.topology import TopologyExecutable


def make_plan(request: Request, is_last: bool = False) -> Plan:
    """Compiles the requested programs and returns what was read of them.

    `is_last` tells that this process plans nothing more. Raises ValueError as
    topology.compile_program.
    """
    params = request.params
    partitioning = request.partitioning
    model = TaskModel(params, partitioning)

    # This is what takes minutes.
    programs: dict[str, ProgramPlan] = {}
    for name in request.programs:
        is_last_program = is_last and name == request.programs[-1]
        programs[name] = plan_program(name, model, params, request.topology, is_last_program)

    # The flops of the mathematics show how much of the program's is of use.
    batch = params.input
    step_flops = model.task.TrainStepFlops(batch.batch_size, *model.task.Lengths(batch))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Plan(
        model=request.model,
        settings=request.settings,
        topology=request.topology,
        mesh=partitioning.mesh.shape,
        sharding={letter: "+".join(names_of([axis])) or "-" for letter, axis in partitioning.table},
        cores=partitioning.mesh.num_partitions,
        weights=model.task.num_weights,
        model_flops_per_core=step_flops / partitioning.mesh.num_partitions,
        host_peak_gib=peak_kib * 1024 / GIB,
        programs=programs,
        bubble=placement.bubble(params),
        unit=model.task.UNIT,
    )


def plan_program(
    name: str, model: TaskModel, params: Params, topology_name: str, is_last: bool = False
) -> ProgramPlan:
    """Compiles a program for a topology and returns what was read of it.

    `is_last` tells that this process traces no other. Raises ValueError as
    topology.compile_program, but not for a program that is too large.
    """
    capacity_gib = hardware.generation(topology_name).capacity_gib

    # From the layers to an exported program, and from there to the cores' own program.
    started = time.monotonic()
    exported = export(name, model, params)
    if is_last:
        tracer.end()  # The compiler needs gigabytes, too.
    lowered = time.monotonic()
    lowered_cpu = time.process_time()
    compiled = _compile(exported, topology_name)
    compile_secs = time.monotonic() - lowered
    compile_cpu_secs = time.process_time() - lowered_cpu

    # Decoding holds the weights alone, in the numbers that the experiment keeps them in.
    state = model.state_spec
    if name == DECODE:
        state = NestedMap(theta=model.decoder_spec().theta, slots=NestedMap())
    state_gib = state_memory.state_gib(state, model.partitioning)

    # Without a program, or one that fits, there are no times.
    batch = _batch(name, params)
    cost = None
    descriptions: tuple[str, ...] = ()
    if isinstance(compiled, Refusal):
        memory_gib = memory.of_refused(compiled, state_gib, capacity_gib)
        largest_buffers = compiled.buffers
        # A refusal of temporaries alone lists no buffers; then the state's largest are shown.
        if not largest_buffers:
            largest_buffers = state_memory.largest_of_state(state, model.partitioning)
    else:
        step = compiled_step.read(compiled)
        memory_gib = memory.of_compiled(step.report, state_gib, capacity_gib)
        largest_buffers = memory.largest_results(step.costs)

        # The compiler for GPUs accepts programs of any size.
        if memory_gib.peak <= capacity_gib:
            mesh = model.partitioning.mesh
            network = networks.network(topology_name, mesh)
            cost = roofline.cost(step, network)
            call = "step" if name == TRAIN else "call"
            descriptions = suspicious.describe(step, batch, mesh.num_partitions, call)

    return ProgramPlan(
        batch=batch,
        fits=cost is not None,
        memory_gib=memory_gib,
        largest_buffers=largest_buffers,
        suspicious=descriptions,
        cost=cost,
        lower_secs=lowered - started,
        compile_secs=compile_secs,
        compile_cpu_secs=compile_cpu_secs,
    )


def export(name: str, model: TaskModel, params: Params, num_steps: int = 1) -> Program:
    """Returns an exported program, in training one of `num_steps`.

    Raises ValueError if the trainer can't export it.
    """
    programs = ExperimentPrograms(params, model.partitioning)

    if name == INITIALIZE:
        return programs.initializer()
    if name == DECODE:
        return programs.decoder(params.task.cls.DecodeLength(params.decode))

    if name == TRAIN:
        return programs.step(Mode.TRAIN, _specs(params.input), num_steps)
    return programs.step(Mode.EVAL, _specs(params.eval_input))


def _specs(batch: Params) -> NestedMap:
    """Returns the TensorSpecs of a batch, as its input makes it."""
    specs: NestedMap = batch.cls.batch_specs(batch)
    return specs


def _compile(exported: Program, topology_name: str) -> TopologyExecutable | Refusal:
    """Returns the compiled program, or the compiler's refusal of one that is too large."""
    try:
        return topology.compile_program(exported, topology_name)
    except topology.OutOfMemoryError as error:
        return memory.parse_refusal(str(error.__cause__))


def _batch(name: str, params: Params) -> Batch:
    """Returns the rows that a call of the program takes; the initializer takes none."""
    if name == INITIALIZE:
        return Batch(0, 0, 0)
    if name == DECODE:
        decode = params.decode
        length = params.task.cls.DecodeLength(decode)
        return Batch(decode.batch_size, length, decode.max_target_len)

    rows = params.input if name == TRAIN else params.eval_input
    return Batch(rows.batch_size, *params.task.cls.Lengths(rows))
