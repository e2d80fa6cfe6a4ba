"""Compiles a program for a topology, and reads its plan."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from xla_plan.cost import compiled_step, memory, roofline
from xla_plan.cost.compiled_step import Compiled, CompiledStep
from xla_plan.cost.kinds import Parts
from xla_plan.cost.memory import Buffer, RoleMemory
from xla_plan.machines import topology
from xla_plan.machines.networks import Network
from xla_plan.plans.program_plan import Batch, ProgramPlan
from xla_spmd.mesh import Mesh
from xla_spmd.runtime import progress

_Compiled = TypeVar("_Compiled", bound=Compiled)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The names that a plan gives to the operations of a compiled program."""

    parts: Parts
    suspicious: tuple[str, ...]  # Signs of a bad partitioning.
    lines: Mapping[str, str] = dataclasses.field(default_factory=dict)  # By op_name, if known.


@dataclasses.dataclass(frozen=True)
class Program(Generic[_Compiled]):
    """A program to plan: how to compile it, and how to read the compiled program."""

    name: str
    topology: str
    mesh: Mesh
    network: Network  # The topology's, in the order of the mesh.
    compile: Callable[[], _Compiled]  # Raises topology.OutOfMemoryError if it is too large.
    read: Callable[[_Compiled, CompiledStep], Reading]
    roles: dict[str, RoleMemory]  # The memory of its arguments, or of its state.
    largest_arguments: tuple[Buffer, ...] = ()
    kernel_flops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    batch: Batch | None = None
    lower_secs: float = 0.0  # The time that it took to make this program.


def plan(program: Program[_Compiled]) -> ProgramPlan:
    """Returns the plan of a program; the plan of too large a program has no cost.

    Raises ValueError if the compiler refuses the program for a reason other than its memory, or if
    flops are given for a kernel that the program lacks.
    """
    started = time.monotonic()
    cpu_started = time.process_time()
    compiled = None
    refusal = None
    try:
        with progress.shown(f"compiling {program.name}"):
            compiled = program.compile()
    except topology.OutOfMemoryError as error:
        refusal = memory.parse_refusal(str(error.__cause__))
    compile_secs = time.monotonic() - started
    compile_cpu_secs = time.process_time() - cpu_started

    capacity_gib = program.network.generation.capacity_gib
    cost = None
    suspicious: Sequence[str] = ()
    if refusal is not None:
        memory_gib = memory.of_refused(refusal, program.roles, capacity_gib)
        # A refusal of temporaries alone lists no buffers.
        largest_buffers = refusal.buffers or program.largest_arguments
    else:
        assert compiled is not None
        step = compiled_step.read(compiled, program.kernel_flops)
        memory_gib = memory.of_compiled(step.report, program.roles, capacity_gib)
        largest_buffers = memory.largest_results(step.costs)

        # The compiler for GPUs accepts programs of any size.
        if memory_gib.peak <= capacity_gib:
            reading = program.read(compiled, step)
            suspicious = reading.suspicious
            cost = roofline.cost(step, program.network, reading.parts, reading.lines)

    return ProgramPlan(
        name=program.name,
        topology=program.topology,
        mesh=program.mesh.shape,
        fits=cost is not None,
        memory_gib=memory_gib,
        largest_buffers=largest_buffers,
        suspicious=tuple(suspicious),
        cost=cost,
        lower_secs=program.lower_secs,
        compile_secs=compile_secs,
        compile_cpu_secs=compile_cpu_secs,
        batch=program.batch,
    )
