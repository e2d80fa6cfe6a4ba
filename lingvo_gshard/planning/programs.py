"""The programs of a run: exported as the trainer exports them, compiled for a topology, and read.

Of training, one step is planned; the trainer's program is a loop over several. Of decoding, which
has a program for each length of sources, the one for the longest is planned: it holds the same
weights and flat sequence as the others and more of the source, so that they fit if it does.
"""

import time

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import compiled_step, hardware, memory
from lingvo_gshard.planning.compiled_step import CompiledStep
from lingvo_gshard.planning.memory import GIB, Buffer, Memory, Refusal
from lingvo_gshard.planning.plan import DECODE, INITIALIZE, TRAIN, Batch, ProgramPlan
from lingvo_gshard.runs.experiment_programs import ExperimentPrograms
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import topology
from lingvo_gshard.spmd.program import Program
from lingvo_gshard.spmd.topology import TopologyExecutable


def export(name: str, model: TranslationModel, params: Params, num_steps: int = 1) -> Program:
    """Exports a program, in training one of `num_steps`. Raises ValueError if the trainer can't."""
    batch = _batch(name, params)
    programs = ExperimentPrograms(params, model.partitioning)
    if name == INITIALIZE:
        return programs.initializer()
    if name == DECODE:
        return programs.decoder(batch.source_len)

    rows = packing.batch_specs(batch.rows, packing.RowShape(batch.source_len, batch.target_len))
    return programs.step(Mode.TRAIN if name == TRAIN else Mode.EVAL, rows, num_steps)


def make(name: str, model: TranslationModel, params: Params, topology_name: str) -> ProgramPlan:
    """Compiles a program for a topology and reads the result. Raises ValueError as the compiler."""
    batch, capacity_gib = _batch(name, params), hardware.generation(topology_name).capacity_gib
    started = time.monotonic()
    exported = export(name, model, params)
    lowered, lowered_cpu = time.monotonic(), time.process_time()
    compiled: TopologyExecutable | Refusal
    try:
        compiled = topology.compile_program(exported, topology_name)
    except topology.OutOfMemoryError as error:
        compiled = memory.parse_refusal(str(error.__cause__))
    compile_secs, compile_cpu_secs = time.monotonic() - lowered, time.process_time() - lowered_cpu
    outcome = compiled if isinstance(compiled, Refusal) else compiled_step.read(compiled)
    slots = NestedMap() if name == DECODE else model.state_spec.slots
    state = NestedMap(theta=model.state_spec.theta, slots=slots)
    memory_gib, largest_buffers = _memory(state, model.partitioning, capacity_gib, outcome)
    cost, suspicious = None, tuple[str, ...]()
    # The compiler for GPUs accepts programs of any size.
    if isinstance(outcome, CompiledStep) and memory_gib.peak <= capacity_gib:
        network = hardware.network(topology_name, model.partitioning.mesh)
        cost = compiled_step.cost(outcome, network)
        suspicious = compiled_step.suspicious(outcome, batch, "step" if name == TRAIN else "call")
    return ProgramPlan(
        batch=batch,
        fits=cost is not None,
        memory_gib=memory_gib,
        largest_buffers=largest_buffers,
        suspicious=suspicious,
        cost=cost,
        lower_secs=lowered - started,
        compile_secs=compile_secs,
        compile_cpu_secs=compile_cpu_secs,
    )


def _batch(name: str, params: Params) -> Batch:
    if name == INITIALIZE:
        return Batch(0, 0, 0)
    if name == DECODE:
        p = params.decode
        return Batch(p.batch_size, p.max_source_len, p.max_target_len)
    p = params.input if name == TRAIN else params.eval_input
    return Batch(p.batch_size, p.source_len, p.target_len)


def _memory(
    state: NestedMap, parts: Partitioning, capacity_gib: float, outcome: CompiledStep | Refusal
) -> tuple[Memory, tuple[Buffer, ...]]:
    """The memory of one core and its largest buffers."""
    held = memory.state_gib(state, parts)
    if isinstance(outcome, CompiledStep):
        peak, temporaries = outcome.report.peak_bytes / GIB, outcome.report.temp_bytes / GIB
        buffers = memory.largest(outcome.costs)
    else:
        peak = outcome.gib
        temporaries = peak if outcome.temporaries_alone else peak - sum(held)
        buffers = outcome.buffers or memory.largest_of_state(state, parts)
    return Memory(capacity_gib, *held, temporaries, peak), buffers
