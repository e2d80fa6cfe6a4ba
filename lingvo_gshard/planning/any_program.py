"""Plans of anybody's program: `plan --program=FILE`, and `of` a function of jax.jit.

from lingvo_gshard.planning import any_program

step = jax.jit(train_step, donate_argnums=0)
plan = any_program.of(step, (state, batch), "v5p:4x4x4", roles=["weights=params", "batch=batch"])
print(any_program.text(plan))

Nothing of the program need be known but what its main function tells: see spmd/foreign.py. What the
devices do is read as that of this project's own programs (compiled/), by kind of operation.
"""

import collections
import dataclasses
import json
import pathlib
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lingvo_gshard.files import atomic_file, digests, json_records, table
from lingvo_gshard.hlo import kernels
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.hlo.hlo_module import num_bytes
from lingvo_gshard.planning import patterns
from lingvo_gshard.planning.compiled import compiled_step, kinds, memory, roofline, suspicious
from lingvo_gshard.planning.compiled.categories import source
from lingvo_gshard.planning.estimate import hardware, networks
from lingvo_gshard.planning.plan import GIB, Buffer, StepCost, Times
from lingvo_gshard.planning.published import factors, factors_text
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import foreign, topology
from lingvo_gshard.spmd.foreign import ForeignExecutable, ForeignProgram

PLAN_JSON = "program_plan.json"  # What --compare reads, plan.json, is that of an experiment.

# The roles of arguments that no pattern names.
_DONATED = "donated arguments"
_OTHERS = "other arguments"

_NUM_BUFFERS = 5  # How many of the largest a text shows.
_NUM_COLLECTIVES = 12


@dataclasses.dataclass(frozen=True)
class RoleMemory:
    """The arguments of one role, on one device."""

    arguments: int
    gib: float
    donated_gib: float  # The part whose memory the results may take.


@dataclasses.dataclass(frozen=True)
class AnyMemory:
    """GiB of one device in a call."""

    capacity: float  # What the compiler leaves to a program.
    roles: dict[str, RoleMemory]
    outputs: float  # Results that do not lie in donated arguments.
    temporaries: float
    peak: float  # The most held at once; of a refused program, what the compiler wanted.


@dataclasses.dataclass(frozen=True)
class SentFrom:
    """All collectives of a kind from one layer in a call."""

    kind: str
    count: int
    bytes: int  # Of the results, on one device.
    source: str  # The layer.
    line: str | None  # Where it was written, such as `model.py:12`; None if that was not kept.


@dataclasses.dataclass(frozen=True)
class AnyPlan:
    """What a call of somebody else's program needs and costs on a topology."""

    program: str
    topology: str
    mesh: dict[str, int]
    fits: bool
    memory_gib: AnyMemory
    largest_buffers: tuple[Buffer, ...]
    cost: StepCost | None  # By users' categories and kinds of operations; None if unfit.
    collectives: tuple[SentFrom, ...]  # The most bytes first.
    secs_by_pass: dict[str, Times]  # By categories.Pass.
    compile_secs: float
    suspicious: tuple[str, ...] = ()  # What a well partitioned program would not have.


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
    kernels.parse_flops, or if no argument has a sharding or the order is no permutation. A program
    that is too large has a plan that tells by how much.
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
        cost=None,
        collectives=(),
        secs_by_pass={},
        compile_secs=compile_secs,
    )
    # The compiler for GPUs accepts programs of any size.
    if not plan.fits:
        return plan

    network = networks.network(topology_name, mesh)
    parts = kinds.by_kind(compiled.module, category_patterns, step)
    passes = roofline.cost(step, network, kinds.PASSES)
    # On one device, everything lies whole.
    arguments = program.arguments if mesh.num_partitions > 1 else ()
    return dataclasses.replace(
        plan,
        cost=roofline.cost(step, network, parts),
        secs_by_pass=passes.roofline_secs_by_category,
        collectives=_sent_from(report.collective_ops, compiled),
        suspicious=suspicious.describe_arguments(step, arguments),
    )


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
    atomic_file.write(folder / "report.md", markdown(plan))


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
        cost=None,
        collectives=(),
        secs_by_pass={},
        compile_secs=time.monotonic() - started,
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


# --- The plan as text ---


def text(plan: AnyPlan) -> str:
    """Returns a plan as one screen of text."""
    held = plan.memory_gib
    axes = ", ".join(f"{name} {size}" for name, size in plan.mesh.items())
    outcome = "fits"
    if not plan.fits:
        outcome = f"does NOT fit, by {held.peak - held.capacity:.2f} GiB or more"
    lines = [
        f"{plan.program} on {plan.topology}: mesh of {axes}",
        f"{outcome}; a call needs {held.peak:.2f} of {held.capacity:.2f} GiB a device",
        _memory_table(held),
    ]
    for buffer in plan.largest_buffers[:_NUM_BUFFERS]:
        lines.append(f"  {buffer.gib:.3g} GiB {buffer.shape} of {buffer.source}")
    if plan.cost is not None:
        lines += _cost_lines(plan, plan.cost)
    lines.append(f"compiled in {plan.compile_secs:.1f} s")
    return "\n".join(lines)


def markdown(plan: AnyPlan) -> str:
    """Returns the report of a plan in Markdown."""
    return f"# {plan.program} on {plan.topology}\n\n```\n{text(plan)}\n```\n"


def _memory_table(held: AnyMemory) -> str:
    rows: list[Sequence[object]] = [("on a device", "arguments", "GiB", "donated GiB")]
    for name, role in held.roles.items():
        rows.append((name, role.arguments, f"{role.gib:.3f}", f"{role.donated_gib:.3f}"))
    rows.append(("outputs not in donated memory", "-", f"{held.outputs:.3f}", "-"))
    rows.append(("temporaries", "-", f"{held.temporaries:.3f}", "-"))
    return table.text(rows, indent="  ")


def _cost_lines(plan: AnyPlan, cost: StepCost) -> Iterator[str]:
    """Yields what a call sends, computes and takes."""
    rows: list[Sequence[object]] = [("collectives of a call, on a device", "count", "MiB", "line")]
    for sent in plan.collectives[:_NUM_COLLECTIVES]:
        mib = f"{sent.bytes / 2**20:.1f}"
        rows.append((f"{sent.kind} from {sent.source}", sent.count, mib, sent.line or "-"))
    yield table.text(rows, indent="  ")
    hidden = len(plan.collectives) - _NUM_COLLECTIVES
    if hidden > 0:
        yield f"  and {hidden} more"
    for description in plan.suspicious[:_NUM_BUFFERS]:
        yield f"suspicious: {description}"

    yield _times_table("of a call", cost.roofline_secs_by_category, cost.flops_per_core)
    yield _times_table("of a call", plan.secs_by_pass, None)
    flops = sum(cost.flops_per_core.values())
    yield (
        f"bound, at the roofline: {1e3 * cost.step_secs:.3g} ms a call, products "
        f"{flops / 1e12:.3g} Tflop a device"
    )
    # Published are steps of training.
    factor = factors.of_topology(plan.topology)
    if factor is not None:
        secs = factors_text.expected_secs(factor, cost.step_secs, "call")
        yield f"expected, if a call is a training step: {secs}"
    yield factors_text.basis(plan.topology)
    if cost.overlapped_secs:
        yield f"  {1e3 * cost.overlapped_secs:.3g} ms of the network lie beside computation"
    for kernel in cost.uncounted_kernels:
        yield f"a kernel without flops, which --kernel_flops can give: {kernel}"
    for layer in cost.uncounted_loops:
        yield f"a loop of unknown length, counted as one trip, in {layer}"


def _times_table(what: str, parts: dict[str, Times], flops: dict[str, float] | None) -> str:
    """Returns the times of parts, the longest first, with their flops if they are given."""
    header = [what, "compute ms", "memory ms", "network ms", "step ms"]
    rows = [header if flops is None else [*header, "Gflop"]]
    for name, secs in sorted(parts.items(), key=lambda part: -part[1].step):
        row = [name, *(f"{1e3 * value:.3f}" for value in dataclasses.astuple(secs))]
        if flops is not None:
            row.append(f"{flops[name] / 1e9:.1f}")
        rows.append(row)
    return table.text(rows, indent="  ")
