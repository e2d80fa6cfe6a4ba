"""Plans of anybody's program: `plan --program=FILE`, and `of` a function of jax.jit.

from lingvo_gshard import planning

step = jax.jit(train_step, donate_argnums=0)
plan = planning.of(step, (state, batch), "v5p:4x4x4", roles=["weights=params", "batch=batch"])
print(planning.text(plan))

A program needs nothing but its main function, whose arguments have names, types, shardings and
donations (spmd/foreign.py). What the devices do is read as that of this project's own programs is
(compiled/), by kind of operation.
"""

import collections
import dataclasses
import json
import pathlib
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.files import atomic_file, digests, json_records
from lingvo_gshard.hlo import kernels
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.hlo.hlo_module import num_bytes
from lingvo_gshard.planning import patterns, program_text
from lingvo_gshard.planning.compiled import compiled_step, kinds, memory, roofline, suspicious
from lingvo_gshard.planning.compiled.categories import source
from lingvo_gshard.planning.compiled.compiled_step import CompiledStep
from lingvo_gshard.planning.estimate import hardware, networks
from lingvo_gshard.planning.patterns import Pattern
from lingvo_gshard.planning.plan import GIB
from lingvo_gshard.planning.program_plan import AnyMemory, AnyPlan, RoleMemory, SentFrom
from lingvo_gshard.planning.published import factors
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import foreign, topology
from lingvo_gshard.spmd.foreign import ForeignExecutable, ForeignProgram

PLAN_JSON = "program_plan.json"  # What --compare reads, plan.json, is that of an experiment.

# The roles of arguments that no pattern names.
_DONATED = "donated arguments"
_OTHERS = "other arguments"


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
) -> AnyPlan:
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

    Raises ValueError as topology.devices, topology.compile_foreign, patterns.assign and
    kernels.parse_flops, or if no argument has a sharding or the order is no permutation. The plan
    of a program that is too large states by how much.
    """
    program = foreign.of_jitted(jitted, args, topology.platform(on))
    return make(
        program,
        on,
        None,
        roles,
        categories,
        kernel_flops,
        device_order=device_order,
        compiler_options=compiler_options,
    )


def of_file(
    path: pathlib.Path,
    topology_name: str,
    mesh: str | None,
    roles: Sequence[str],
    categories: Sequence[str],
    kernel_flops: Sequence[str] = (),
) -> AnyPlan:
    """Returns the plan of the program in a file. Raises ValueError as foreign.read and `make`."""
    program = foreign.read(path, topology.platform(topology_name))
    return make(program, topology_name, mesh, roles, categories, kernel_flops)


def make(
    program: ForeignProgram,
    topology_name: str,
    mesh_text: str | None,
    roles: Sequence[str],
    categories: Sequence[str],
    kernel_flops: Sequence[str] = (),
    device_order: Sequence[int] | None = None,
    compiler_options: Mapping[str, str] = types.MappingProxyType({}),
) -> AnyPlan:
    """Returns the plan of a program, whose mesh a text such as `data:16,model:4` may name.

    Raises ValueError as `of`, or if the mesh is not that of the program and the topology.
    """
    # What can be wrong is found before the compiler takes minutes.
    capacity_gib = hardware.generation(topology_name).capacity_gib
    mesh = _mesh(program, topology_name, mesh_text)
    if device_order is not None:
        mesh = Mesh(mesh.axis_names, mesh.axis_sizes, tuple(device_order))
    category_patterns = patterns.parse("--category", categories)
    by_role = _memory_by_role(program, roles)
    known_flops = kernels.parse_flops(kernel_flops)

    started = time.monotonic()
    try:
        compiled = topology.compile_foreign(program, topology_name, mesh.devices, compiler_options)
    except topology.OutOfMemoryError as error:
        refusal = memory.parse_refusal(str(error.__cause__))
        return _refused(program, topology_name, mesh, by_role, capacity_gib, refusal, started)
    compile_secs = time.monotonic() - started

    step = compiled_step.read(compiled, known_flops)
    report = step.report
    held = AnyMemory(
        capacity=capacity_gib,
        roles=by_role,
        outputs=(report.output_bytes - report.alias_bytes) / GIB,
        temporaries=report.temp_bytes / GIB,
        peak=report.peak_bytes / GIB,
    )
    plan = AnyPlan(
        program=program.name,
        topology=topology_name,
        mesh=mesh.shape,
        fits=held.peak <= capacity_gib,
        memory_gib=held,
        largest_buffers=memory.largest_results(step.costs),
        compile_secs=compile_secs,
    )
    # The compiler for GPUs accepts programs of any size.
    if not plan.fits:
        return plan
    return _with_cost(plan, program, mesh, compiled, step, category_patterns)


def save(plan: AnyPlan, folder: pathlib.Path) -> None:
    """Writes folder/program_plan.json, the plan's fields and its expected time; folder/report.md.

    Raises ValueError as factors.of_topology.
    """
    values = dataclasses.asdict(plan)
    factor = factors.of_topology(plan.topology)
    values["expected"] = None
    if factor is not None and plan.cost is not None:
        values["expected"] = factor.as_json(plan.cost.step_secs)

    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(digests.with_digest(values), indent=2)
    atomic_file.write(folder / PLAN_JSON, f"{content}\n")
    atomic_file.write(folder / "report.md", program_text.markdown(plan))


def load(folder: pathlib.Path) -> AnyPlan:
    """Returns the plan that `save` wrote; ValueError if there is none, or it is damaged."""
    path = folder / PLAN_JSON
    if not path.is_file():
        raise ValueError(f"{folder}: no {PLAN_JSON} there.")
    try:
        values = json_records.parse(path.read_bytes())
        plan: AnyPlan = json_records.read(AnyPlan, values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or outdated ({error!r}); plan again.") from error
    if not digests.pop_digest(values):
        raise ValueError(f"{path} is damaged or outdated: its digest is not that of its contents.")
    return plan


def _refused(
    program: ForeignProgram,
    topology_name: str,
    mesh: Mesh,
    by_role: dict[str, RoleMemory],
    capacity_gib: float,
    refusal: memory.Refusal,
    started: float,
) -> AnyPlan:
    """Returns the plan of a program that the compiler refused as too large."""
    # The compiler gives up at the temporaries if these are too large without the arguments.
    temporaries = refusal.gib
    if not refusal.temporaries_alone:
        temporaries -= sum(role.gib for role in by_role.values())
    return AnyPlan(
        program=program.name,
        topology=topology_name,
        mesh=mesh.shape,
        fits=False,
        memory_gib=AnyMemory(capacity_gib, by_role, 0.0, temporaries, refusal.gib),
        largest_buffers=refusal.buffers,
        compile_secs=time.monotonic() - started,
    )


def _with_cost(
    plan: AnyPlan,
    program: ForeignProgram,
    mesh: Mesh,
    compiled: ForeignExecutable,
    step: CompiledStep,
    category_patterns: Sequence[Pattern],
) -> AnyPlan:
    """Returns the plan of a program that fits, with what a call costs and sends."""
    network = networks.network(plan.topology, mesh)
    parts = kinds.by_kind(compiled.module, category_patterns, step)
    passes = roofline.cost(step, network, kinds.PASSES)

    # On one device, everything lies whole.
    arguments = program.arguments if mesh.num_partitions > 1 else ()
    return dataclasses.replace(
        plan,
        cost=roofline.cost(step, network, parts),
        secs_by_pass=passes.roofline_secs_by_category,
        collectives=_sent_from(step.report.collective_ops, compiled),
        suspicious=suspicious.describe_arguments(step, arguments),
    )


def _mesh(program: ForeignProgram, topology_name: str, text: str | None) -> Mesh:
    """Returns the mesh of a program on all devices of a topology.

    Raises ValueError if it has another size, if `text` names other axes than the program, or if the
    program has several devices and no sharding.
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

    if program.num_partitions != num_devices or mesh.num_partitions != num_devices:
        raise ValueError(
            f"program {program.name} is partitioned for {program.num_partitions} devices, and "
            f"topology {topology_name} has {num_devices}."
        )
    if num_devices > 1 and not any(argument.has_sharding for argument in program.arguments):
        raise ValueError(
            f"program {program.name}: no argument has a sharding; give jax.jit in_shardings, or "
            "its arguments shardings, before it is exported."
        )
    return mesh


def _memory_by_role(program: ForeignProgram, roles: Sequence[str]) -> dict[str, RoleMemory]:
    """Returns the memory of the arguments by the users' roles; the rest by whether donated."""
    role_patterns = patterns.parse("--role", roles)
    names = [argument.name for argument in program.arguments]
    labels = patterns.assign("--role", role_patterns, names)

    members = collections.defaultdict(list)
    for argument in program.arguments:
        rest = _DONATED if argument.is_donated else _OTHERS
        members[labels.get(argument.name, rest)].append(argument)

    by_role = {}
    for role, arguments in members.items():
        donated = [argument.local for argument in arguments if argument.is_donated]
        by_role[role] = RoleMemory(
            arguments=len(arguments),
            gib=num_bytes(argument.local for argument in arguments) / GIB,
            donated_gib=num_bytes(donated) / GIB,
        )
    return by_role


def _sent_from(
    collectives: Sequence[Collective], compiled: ForeignExecutable
) -> tuple[SentFrom, ...]:
    """Returns the sums of collectives of each kind, layer and line, the most bytes first."""
    lines = compiled.source_lines()
    counts = collections.Counter[tuple[str, str, str | None]]()
    bytes_sent = collections.Counter[tuple[str, str, str | None]]()
    for collective in collectives:
        line = lines.get(collective.op_name)
        key = collective.kind, source(collective.op_name), line
        counts[key] += collective.times
        bytes_sent[key] += collective.times * collective.result_bytes

    sums = []
    for key, size in bytes_sent.most_common():
        kind, layer, line = key
        sums.append(SentFrom(kind, counts[key], size, layer, line))
    return tuple(sums)
