"""Plans of anybody's program: `plan program --program=FILE`, and `of` a function of jax.jit.

import xla_plan

step = jax.jit(train_step, donate_argnums=0)
plan = xla_plan.plan(step, (state, batch), "v5p:4x4x4", roles=["weights=params", "batch=batch"])
print(xla_plan.text(plan))

A program needs nothing but its main function, whose arguments have names, types, shardings and
donations (xla_plan/program/stablehlo_program.py). Its operations are grouped by kind.
"""

import collections
import dataclasses
import functools
import pathlib
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any

from xla_plan.cost import kinds, suspicious
from xla_plan.cost.compiled_step import CompiledStep
from xla_plan.cost.memory import RoleMemory
from xla_plan.machines import networks, topology
from xla_plan.machines.hardware import GIB
from xla_plan.plans import fingerprints, own_process, plan_folder, planner, program_text
from xla_plan.plans.planner import Reading
from xla_plan.plans.program_plan import ProgramPlan
from xla_plan.program import patterns, program_file, stablehlo_program
from xla_plan.program.patterns import Pattern
from xla_plan.program.stablehlo_program import StablehloExecutable, StablehloProgram
from xla_spmd.hlo import kernels
from xla_spmd.hlo.hlo_module import num_bytes
from xla_spmd.mesh import Mesh

# The roles of arguments that no pattern names.
_DONATED = "donated arguments"
_OTHERS = "other arguments"


@dataclasses.dataclass(frozen=True)
class Options:
    """A user's optional description of a program."""

    mesh: str | None = None  # The mesh, such as `data:16,model:4`; the program's own by default.
    roles: Sequence[str] = ()  # `LABEL=REGEX` of arguments' names, such as `weights=params`.
    # `LABEL=REGEX` of operations by scope, such as `attention=/attn/`.
    categories: Sequence[str] = ()
    kernel_flops: Sequence[str] = ()  # `NAME=FLOPS` of one run of a Pallas kernel on a device.
    # The topology's device of each place in the mesh, flattened; 0, 1, 2, ... by default.
    device_order: Sequence[int] | None = None
    # XLA's options, by name.
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FileRequest:
    """The program in a file, to be planned for a topology."""

    path: pathlib.Path
    topology: str
    options: Options = Options()

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return f"--program={self.path}"


def of(
    jitted: Any,
    args: Sequence[Any],
    on: str,
    *,
    roles: Sequence[str] = (),
    categories: Sequence[str] = (),
    kernel_flops: Sequence[str] = (),
    device_order: Sequence[int] | None = None,
    compiler_options: Mapping[str, str] = types.MappingProxyType({}),
) -> ProgramPlan:
    """Returns the plan of a call `jitted(*args)` on a topology.

    Args:
      jitted: a function of jax.jit, with its donate_argnums and out_shardings.
      args: trees of arrays or ShapeDtypeStructs, with shardings on a mesh of as many devices as the
        topology has; it may be a jax.sharding.AbstractMesh.
      on: the topology's name, such as `v5p:4x4x4`.
      roles: `LABEL=REGEX` of arguments by name, such as `weights=params`.
      categories: `LABEL=REGEX` of operations by scope, such as `attention=/attn/`.
      kernel_flops: `NAME=FLOPS` of one run of a Pallas kernel on a device.
      device_order: the topology's device of each place in the mesh, flattened; 0, 1, 2, ... by
        default.
      compiler_options: XLA's, by name, for this program alone.

    The plan of too large a program states the excess. Raises ValueError for an unknown topology,
    for arguments without shardings or for a different number of devices, for a malformed pattern or
    one without a match, and if the order is not a permutation.
    """
    started = time.monotonic()
    program = stablehlo_program.of_jitted(jitted, args, topology.platform(on))
    lower_secs = time.monotonic() - started
    options = Options(
        roles=roles,
        categories=categories,
        kernel_flops=kernel_flops,
        device_order=device_order,
        compiler_options=dict(compiler_options),
    )
    return make(program, on, options, lower_secs)


def of_file(request: FileRequest) -> ProgramPlan:
    """Returns the plan of the program in a file.

    Raises ValueError if the file does not hold a program for the topology, or if an option does not
    suit the program.
    """
    started = time.monotonic()
    program = program_file.read(request.path, topology.platform(request.topology))
    lower_secs = time.monotonic() - started
    return make(program, request.topology, request.options, lower_secs)


def load_or_make(request: FileRequest, folder: pathlib.Path) -> ProgramPlan:
    """Returns the plan in `folder` of the program in a file, and makes it first if needed.

    The plan is made again if the file, the options, the code, the compilers or their options have
    changed. A separate process makes it: a damaged file can make parsers and compilers die. Raises
    ValueError if the file does not hold a program for the topology, if an option does not suit the
    program, or if the process died.
    """
    # The report contains the program's name.
    program = (request.path.name, program_file.digest(request.path))
    options = dataclasses.asdict(request.options)
    return plan_folder.load_or_make(
        ProgramPlan,
        folder,
        fingerprints.of(program, request.topology, options),
        functools.partial(own_process.call, of_file, request),
        program_text.markdown,
    )


def make(
    program: StablehloProgram, on: str, options: Options, lower_secs: float = 0.0
) -> ProgramPlan:
    """Returns the plan of a program; `lower_secs` is the time to make or read the program.

    Raises ValueError for an unknown topology, if the program is for a different number of devices
    or mesh, for a pattern without a match, and if the compiler refuses the program for a reason
    other than its memory.
    """
    # Mistakes are found before the compiler takes minutes.
    mesh = _mesh(program, on, options.mesh)
    if options.device_order is not None:
        mesh = Mesh(mesh.axis_names, mesh.axis_sizes, tuple(options.device_order))
    categories = patterns.parse("--category", options.categories)
    return planner.plan(
        planner.Program(
            name=program.name,
            topology=on,
            mesh=mesh,
            network=networks.network(on, mesh),
            compile=lambda: topology.compile_program(
                program, on, mesh.devices, options.compiler_options
            ),
            read=functools.partial(_read, program, categories),
            roles=_memory_by_role(program, options.roles),
            kernel_flops=kernels.parse_flops(options.kernel_flops),
            lower_secs=lower_secs,
        )
    )


def _read(
    program: StablehloProgram,
    categories: Sequence[Pattern],
    compiled: StablehloExecutable,
    step: CompiledStep,
) -> Reading:
    """Returns the parts of a program by kind of operation, and signs of a bad partitioning."""
    # On one device, every tensor is whole.
    arguments = program.arguments if program.num_partitions > 1 else ()
    return Reading(
        parts=kinds.by_kind(compiled.module, categories, step),
        suspicious=(
            *_of_propagation(compiled),
            *suspicious.describe_arguments(step, arguments),
        ),
        lines=compiled.source_lines(),
    )


def _of_propagation(compiled: StablehloExecutable) -> list[str]:
    """Returns a line if GSPMD propagated a program's annotations; empty if Shardy did."""
    if not compiled.gspmds_reason:
        return []
    return [f"its annotations are GSPMD's, which XLA will remove: {compiled.gspmds_reason}"]


def _mesh(program: StablehloProgram, topology_name: str, text: str | None) -> Mesh:
    """Returns the mesh of a program on all devices of a topology.

    Raises ValueError if the mesh does not have one place a device, if the axes in `text` differ
    from the program's, or if the program has several devices and no sharding.
    """
    num_devices = len(topology.devices(topology_name))
    if text is not None:
        mesh = Mesh.parse(text, num_devices)
        if program.axes and mesh.shape != program.axes:
            axes = ",".join(f"{name}:{size}" for name, size in program.axes.items())
            raise ValueError(f"--mesh={text}: program {program.name} is for {axes}.")
    elif program.axes:
        mesh = Mesh(tuple(program.axes), tuple(program.axes.values()))
    else:
        mesh = Mesh.flat(program.num_partitions)

    if num_devices > 1 and not any(argument.has_sharding for argument in program.arguments):
        raise ValueError(
            f"program {program.name}: no argument has a sharding; give jax.jit in_shardings, or "
            "its arguments shardings, before it is exported."
        )
    if program.num_partitions != num_devices or mesh.num_partitions != num_devices:
        raise ValueError(
            f"program {program.name} is partitioned for {program.num_partitions} devices, and "
            f"topology {topology_name} has {num_devices}."
        )
    return mesh


def _memory_by_role(program: StablehloProgram, roles: Sequence[str]) -> dict[str, RoleMemory]:
    """Returns the arguments' memory by the users' roles; others are donated or not."""
    role_patterns = patterns.parse("--role", roles)
    names = [argument.name for argument in program.arguments]
    labels = patterns.assign("--role", role_patterns, names)

    members = collections.defaultdict(list)
    for argument in program.arguments:
        rest = _DONATED if argument.is_donated else _OTHERS
        members[labels.get(argument.name, rest)].append(argument)

    by_role = {}
    for role, arguments in members.items():
        on_device = [argument for argument in arguments if not argument.is_on_host]
        on_host = [argument.local for argument in arguments if argument.is_on_host]
        donated = [argument.local for argument in on_device if argument.is_donated]
        by_role[role] = RoleMemory(
            arguments=len(arguments),
            gib=num_bytes(argument.local for argument in on_device) / GIB,
            donated_gib=num_bytes(donated) / GIB,
            host_gib=num_bytes(on_host) / GIB,
        )
    return by_role
