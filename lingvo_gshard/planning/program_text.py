"""A plan of anybody's program as text, on one screen."""

import dataclasses
from collections.abc import Iterator, Sequence

from lingvo_gshard.files import table
from lingvo_gshard.planning.plan import StepCost, Times
from lingvo_gshard.planning.program_plan import AnyMemory, AnyPlan
from lingvo_gshard.planning.published import factors, factors_text

_NUM_BUFFERS = 5  # How many of the largest are shown.
_NUM_COLLECTIVES = 12


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
