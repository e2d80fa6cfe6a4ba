"""A plan of a program as text, on one screen."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from xla_plan.cost.memory import Memory
from xla_plan.cost.step_cost import CollectiveSum, StepCost, Times
from xla_plan.expected import factors_text
from xla_plan.machines import topology
from xla_plan.plans.program_plan import ProgramPlan
from xla_spmd.files import table

_NUM_BUFFERS = 5  # How many of the largest buffers are shown.
_NUM_COLLECTIVES = 8
_SMALLEST_SHARE = 0.005  # A smaller part of the bound that the data decide is not mentioned.
_NUMBER = re.compile(r"_\d+(?=/|$)")  # The number at the end of a scope's name.
_NUM_PLACES = 4  # How many conditionals, loops and ragged operations are named.


@dataclasses.dataclass(frozen=True)
class Call:
    """The words for a call of a program, and figures that its plan does not have."""

    name: str = "call"
    outcome: str = "fits"  # The words for a program that fits.
    # The words before an expected time, which holds for training steps; empty if it does not hold.
    expected: str = "expected, if a call is a training step"
    model_flops: float | None = None  # One core's flops of the model's mathematics alone.
    rates: Callable[[float], str] | None = None  # Describes the rates at a share of the roofline.


def text(plan: ProgramPlan) -> str:
    """Returns a plan as one screen of text."""
    axes = ", ".join(f"{name} {size}" for name, size in plan.mesh.items())
    lines = [f"{plan.name} on {plan.topology}: mesh of {axes}", *described(plan, Call())]
    if plan.cost is not None:
        lines += caveats(plan.cost)
    return "\n".join([*lines, compilation(plan)])


def markdown(plan: ProgramPlan) -> str:
    """Returns the report of a plan in Markdown."""
    return f"# {plan.name} on {plan.topology}\n\n```\n{text(plan)}\n```\n"


def described(plan: ProgramPlan, call: Call) -> Iterator[str]:
    """Yields the memory of a call, and if it fits, its collectives, its work and its time."""
    held = plan.memory_gib
    outcome = call.outcome
    if not plan.fits:
        outcome = f"does NOT fit, by {held.peak - held.capacity:.2f} GiB or more"
    yield (
        f"{outcome}; a {call.name} needs {held.peak:.2f} of {held.capacity:.2f} GiB a "
        f"{device(plan.topology)}"
    )
    yield _memory_table(held)
    for buffer in plan.largest_buffers[:_NUM_BUFFERS]:
        yield f"  {buffer.gib:.3g} GiB {buffer.shape} of {buffer.source}"
    if plan.cost is not None:
        yield from _cost_lines(plan, plan.cost, call)
        yield from _time_lines(plan, plan.cost, call)


def compilation(plan: ProgramPlan) -> str:
    """Returns how long it took to make the program and to compile it."""
    return (
        f"lowered in {plan.lower_secs:.1f} s, compiled in {plan.compile_secs:.1f} s "
        f"({plan.compile_cpu_secs:.1f} of CPU)"
    )


def device(topology_name: str) -> str:
    """Returns the word for a topology's devices."""
    return "GPU" if topology.is_gpu(topology_name) else "core"


def caveats(cost: StepCost) -> Iterator[str]:
    """Yields the range of a program's time over all data, and the parts that it leaves out."""
    share = cost.share_by_data
    if share >= _SMALLEST_SHARE and cost.least_step_secs is not None:
        most_flops = sum(cost.flops_per_core.values())
        least_flops = cost.least_flops_per_core or 0.0
        yield (
            f"the data decide {share:.0%} of the bound: at least "
            f"{1e3 * cost.least_step_secs:.3g} ms and {least_flops / 1e12:.3g} Tflop, at most "
            f"{1e3 * cost.step_secs:.3g} ms and {most_flops / 1e12:.3g} Tflop; "
            f"{_places(cost.by_data)}"
        )
    for call in cost.uncounted_kernels:
        yield (
            f"not counted, so that its share of the time is unknown: what {call} computes; "
            f"--kernel_flops={call}=FLOPS gives it for a --program"
        )
    for layer in _alike(cost.uncounted_loops):
        yield f"a loop of unknown length, counted as one trip, in {layer}"


def _memory_table(held: Memory) -> str:
    # Few programs keep arguments in the host's memory.
    has_host = any(role.host_gib for role in held.roles.values())
    rows: list[Sequence[object]] = [
        ("on a device", "arguments", "GiB", "donated GiB", "GiB of the host")
    ]
    for name, role in held.roles.items():
        sizes = (f"{role.gib:.3f}", f"{role.donated_gib:.3f}", f"{role.host_gib:.3f}")
        rows.append((name, role.arguments, *sizes))
    rows.append(("outputs not in donated memory", "-", f"{held.outputs:.3f}", "-", "-"))
    rows.append(("temporaries", "-", f"{held.temporaries:.3f}", "-", "-"))
    # Temporaries may be in donated arguments, and not all are held at the same time.
    rows.append(("of all this at once, at most", "-", f"{held.peak:.3f}", "-", "-"))
    return table.text([row if has_host else row[:-1] for row in rows], indent="  ")


def _cost_lines(plan: ProgramPlan, cost: StepCost, call: Call) -> Iterator[str]:
    """Yields the collectives and the work of a call."""
    name = device(plan.topology)
    yield _collectives(f"collectives of a {call.name} on one {name}", cost.collectives)
    for description in _alike(plan.suspicious or ("nothing",)):
        yield f"suspicious: {description}"

    yield _times_table(f"of a {call.name}", cost.roofline_secs_by_category, cost)
    if len(cost.roofline_secs_by_pass) > 1:
        yield _times_table("of a pass", cost.roofline_secs_by_pass)
    products = f"products {sum(cost.flops_per_core.values()) / 1e12:.3g} Tflop a {name}"
    if call.model_flops is not None:
        products += f", of which the mathematics asks for {call.model_flops / 1e12:.3g}"
    yield products
    yield from _peak_rates(cost)
    if cost.recomputed_flops_per_core:
        yield (
            f"recomputed for the gradient: {cost.recomputed_flops_share:.0%} of the products, "
            f"{cost.recomputed_time_share:.0%} of the roofline's time"
        )


def _time_lines(plan: ProgramPlan, cost: StepCost, call: Call) -> Iterator[str]:
    """Yields the time of a call at the roofline, and the expected time."""
    if cost.overlapped_secs:
        yield (
            f"beside computation, by the schedule: {1e3 * cost.overlapped_secs:.3g} of "
            f"{1e3 * cost.roofline_secs.network:.3g} ms of the network"
        )

    def rates(share: float) -> str:
        return f", {call.rates(share)}" if call.rates is not None else ""

    yield f"bound, at the roofline: {cost.step_secs:.3g} s a {call.name}{rates(1.0)}"
    if call.expected:
        factor = plan.factor
        if factor is not None:
            secs = factors_text.expected_secs(factor, cost.step_secs, call.name)
            yield f"{call.expected}: {secs}{rates(factor.value)}"
        yield factors_text.basis(plan.topology, plan.shares)
        yield from factors_text.extrapolation(
            plan.topology,
            cost.step_secs,
            devices=plan.cores,
            row_tokens=None if plan.batch is None else plan.batch.target_len,
            shares=plan.shares,
        )

    size = f"{cost.instructions} instructions"
    if cost.xla_optimal_secs:
        size = (
            f"XLA's optimal_seconds {cost.xla_optimal_secs:.3g} s (its loops once: "
            f"{cost.xla_optimal_secs_once:.3g}), {size}"
        )
    yield size


def _collectives(title: str, collectives: Sequence[CollectiveSum]) -> str:
    """Returns the table of collectives by kind, layer and line, the most bytes first."""
    rows: list[Sequence[object]] = [(title, "count", "MiB", "line")]
    for collective in collectives[:_NUM_COLLECTIVES]:
        name = f"{collective.kind} from {collective.source}"
        mib = f"{collective.bytes / 2**20:.1f}"
        rows.append((name, collective.count, mib, collective.line or "-"))
    others = collectives[_NUM_COLLECTIVES:]
    if others:
        count = sum(collective.count for collective in others)
        mib = f"{sum(collective.bytes for collective in others) / 2**20:.1f}"
        rows.append((f"others, from {len(others)} more places", count, mib, "-"))
    return table.text(rows, indent="  ")


def _times_table(title: str, parts: Mapping[str, Times], cost: StepCost | None = None) -> str:
    """Returns the times of parts, the longest first; given the cost, with flops and the sum."""
    header = [title, "compute ms", "memory ms", "network ms", "all ms"]
    rows = [header if cost is None else [*header, "Gflop"]]
    for name, secs in sorted(parts.items(), key=lambda part: -part[1].step):
        cells = [name, *_millis(secs)]
        if cost is not None:
            cells.append(f"{cost.flops_per_core[name] / 1e9:.1f}")
        rows.append(cells)
    if cost is not None:
        flops = sum(cost.flops_per_core.values())
        rows.append(["all", *_millis(cost.roofline_secs), f"{flops / 1e9:.1f}"])
    return table.text(rows, indent="  ")


def _millis(secs: Times) -> Iterable[str]:
    return [f"{1e3 * value:.3f}" for value in dataclasses.astuple(secs)]


def _peak_rates(cost: StepCost) -> Iterator[str]:
    """Yields the peak rates that products count at, such as `f32 as tf32 495 Tflop/s`, if any."""
    all_flops = sum(rate.flops for rate in cost.product_rates)
    described = []
    for rate in cost.product_rates:
        name = rate.arithmetic
        if rate.counted_as != rate.arithmetic:
            name += f" as {rate.counted_as}"
        rate_text = f"{name} {rate.flops_per_sec / 1e12:.4g} Tflop/s"
        if len(cost.product_rates) > 1:
            rate_text += f" ({rate.flops / all_flops:.1%} of the flops)"
        described.append(rate_text)
    if described:
        yield f"peak rates of products: {', '.join(described)}"


def _alike(descriptions: Sequence[str]) -> Iterator[str]:
    """Yields the first description of each kind, with the number of the others.

    Descriptions of one kind differ only in the numbers of scopes. These number unrolled layers, as
    in `decoder/layers_1` or TensorFlow's `experts_46`.
    """
    counts = collections.Counter(_NUMBER.sub("", description) for description in descriptions)
    for description in descriptions:
        others = counts.pop(_NUMBER.sub("", description), 0) - 1
        if others >= 0:
            yield f"{description}, and {others} alike" if others else description


def _places(places: tuple[str, ...]) -> str:
    """Returns the names of the first places, and how many others there are."""
    named = ", ".join(places[:_NUM_PLACES])
    others = len(places) - _NUM_PLACES
    return f"{named} and {others} more" if others > 0 else named
