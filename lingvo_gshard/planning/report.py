"""Plans as text, as report.md, side by side, and as pictures after Figures 7 and 8."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from lingvo_gshard.core import table
from lingvo_gshard.planning.categories import Category
from lingvo_gshard.planning.memory import Memory
from lingvo_gshard.planning.plan import NOTHING, PAPERS_SHARE, Plan, StepCost

MEMORY_PNG, TIME_PNG, REPORT_MD = "memory.png", "time.png", "report.md"

# Figure 7's parts, from the bottom of a bar.
MEMORY_PARTS = ("replicated_weights", "expert_weights", "optimizer_slots", "temporaries")
_TIMES = ("compute", "memory", "network", "step")
_NUM_BUFFERS = 5


def write(plan: Plan, folder: pathlib.Path) -> None:
    """Writes folder/report.md and its pictures."""
    pictures = [MEMORY_PNG]
    draw_memory({plan.model: plan.memory_gib}, folder / MEMORY_PNG)
    if plan.cost:
        pictures.append(TIME_PNG)
        draw_times({plan.model: plan.cost}, folder / TIME_PNG)
    images = "\n".join(f"![{name}]({name})" for name in pictures)
    (folder / REPORT_MD).write_text(
        f"# {plan.model} on {plan.topology}\n\n```\n{text(plan)}\n```\n\n{images}\n"
    )


def comparison(plans: Sequence[Plan]) -> str:
    """Returns plans side by side, and the ratio of the last plan's figures to the first's.

    A plan that does not fit has no times.
    """
    titles = [
        f"{i}: {plan.model} on {plan.topology}, {_partitioning(plan)}"
        for i, plan in enumerate(plans, 1)
    ]
    columns = [dict(_figures(plan)) for plan in plans]
    rows = [("", *(plan.model for plan in plans), "ratio")]
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        first, last = values[0], values[-1]
        ratio = last / first if first and last is not None else None
        cells = (table.number(value, ".4g") for value in values)
        rows.append((name, *cells, table.number(ratio, ".3f")))
    return "\n".join([*titles, table.text(rows)])


def draw_memory(memories: Mapping[str, Memory], path: pathlib.Path) -> None:
    """Draws Figure 7: a bar of GiB per core for each plan; a dashed line is the capacity."""
    parts = {
        part.replace("_", " "): [getattr(memory, part) for memory in memories.values()]
        for part in MEMORY_PARTS
    }
    figure = _stacked(list(memories), parts, "GiB a core")
    for capacity in {memory.capacity for memory in memories.values()}:
        figure.axes[0].axhline(capacity, color="black", linestyle="--", linewidth=1)
    figure.savefig(path, dpi=130)


def draw_times(costs: Mapping[str, StepCost], path: pathlib.Path) -> None:
    """Draws Figure 8: a bar of the roofline's milliseconds by category for each plan."""
    parts = {}
    for category in Category:
        times = [cost.roofline_secs_by_category.get(category, NOTHING) for cost in costs.values()]
        parts[category.replace("_", ", ")] = [1e3 * (each.step - each.network) for each in times]
    parts["collectives"] = [1e3 * cost.roofline_secs.network for cost in costs.values()]
    _stacked(list(costs), parts, "ms a step at the roofline").savefig(path, dpi=130)


def text(plan: Plan) -> str:
    """Returns a plan as one screen of text."""
    lines = [
        f"{plan.model} on {plan.topology}: {plan.cores} cores, {table.count(plan.weights)} "
        f"weights, {plan.tokens_per_core:.0f} target tokens a core"
    ]
    if plan.settings:
        lines.append("settings: " + ", ".join(plan.settings))
    lines += _memory_lines(plan)
    if plan.cost:
        lines += _cost_lines(plan, plan.cost)
    lines.append(
        f"lowered in {plan.lower_secs:.1f} s, compiled in {plan.compile_secs:.1f} s "
        f"({plan.compile_cpu_secs:.1f} of CPU), {plan.host_peak_gib:.1f} GiB of this machine"
    )
    return "\n".join(lines)


def _memory_lines(plan: Plan) -> Iterator[str]:
    memory = plan.memory_gib
    over = memory.peak - memory.capacity
    verdict = "fits" if plan.fits else f"does NOT fit, by {over:.2f} GiB or more"
    yield f"{verdict}: {memory.peak:.2f} of {memory.capacity:.2f} GiB a core"
    parts = (f"{part.replace('_', ' ')} {getattr(memory, part):.2f}" for part in MEMORY_PARTS)
    yield "  " + ", ".join(parts)
    for buffer in plan.largest_buffers[:_NUM_BUFFERS]:
        yield f"  {buffer.gib:.3g} GiB {buffer.shape} of {buffer.source}"


def _cost_lines(plan: Plan, cost: StepCost) -> Iterator[str]:
    yield _collectives(cost)
    for each in plan.suspicious or ("nothing",):
        yield f"suspicious: {each}"
    yield _categories(cost)
    yield (
        f"products {sum(cost.flops_per_core.values()) / 1e12:.2f} Tflop a core, of which the "
        f"mathematics asks for {cost.model_flops_per_core / 1e12:.2f}"
    )
    for share in (1.0, PAPERS_SHARE):
        yield (
            f"at {share:.0%} of the roofline: {cost.roofline_secs.step / share:.3g} s a step, "
            f"{plan.steps_per_sec(share):.2f} steps/s, {plan.tokens_per_sec(share) / 1e6:.2f} M "
            f"tokens/s, {plan.core_years(share):.1f} core-years for 10^12 tokens"
        )
    yield (
        f"XLA's optimal_seconds {cost.xla_optimal_secs:.3g} s (its loops once: "
        f"{cost.xla_optimal_secs_once:.3g}), {cost.instructions} instructions"
    )


def _collectives(cost: StepCost) -> str:
    """Returns the table of collectives by kind, with the two sources of the most bytes."""
    rows: list[Sequence[object]] = [("collectives of a step on one core", "count", "MiB")]
    for kind, (count, mib) in sorted(_by_kind(cost).items(), key=lambda item: -item[1][0]):
        sources = [each.source for each in cost.collectives if each.kind == kind]
        more = f" and {len(sources) - 2} more" if len(sources) > 2 else ""
        rows.append((f"  {kind} from {', '.join(sources[:2])}{more}", count, f"{mib:.1f}"))
    return table.text(rows)


def _by_kind(cost: StepCost) -> dict[str, tuple[int, float]]:
    """Returns the number of collectives of each kind and their MiB."""
    sums: dict[str, tuple[int, float]] = {}
    for each in cost.collectives:
        count, mib = sums.get(each.kind, (0, 0.0))
        sums[each.kind] = count + each.count, mib + each.bytes / 2**20
    return sums


def _categories(cost: StepCost) -> str:
    """Returns the table of times by category, the longest first."""
    by_category = cost.roofline_secs_by_category
    ranked = sorted(by_category.items(), key=lambda item: -item[1].step)
    flops = cost.flops_per_core | {"all": sum(cost.flops_per_core.values())}
    rows = [["of a step", "Gflop", *(f"{part} ms" for part in _TIMES)]]
    for name, times in [*ranked, ("all", cost.roofline_secs)]:
        cells = (f"{1e3 * getattr(times, part):.2f}" for part in _TIMES)
        rows.append([name, f"{flops[name] / 1e9:.0f}", *cells])
    return table.text(rows, indent="  ")


def _partitioning(plan: Plan) -> str:
    mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
    sharding = ", ".join(f"{letter}:{axis}" for letter, axis in plan.sharding.items())
    return "; ".join([f"mesh {mesh}", f"table {sharding}", *plan.settings])


def _figures(plan: Plan) -> Iterator[tuple[str, float]]:
    yield "fits", float(plan.fits)
    for part in (*MEMORY_PARTS, "peak"):
        yield f"{part} GiB", getattr(plan.memory_gib, part)
    yield "lower s", plan.lower_secs
    yield "compile s", plan.compile_secs
    yield "compile CPU s", plan.compile_cpu_secs
    if plan.cost is None:
        return
    for part in _TIMES:
        yield f"roofline {part} ms", 1e3 * getattr(plan.cost.roofline_secs, part)
    for name, times in sorted(plan.cost.roofline_secs_by_category.items()):
        yield f"{name} ms", 1e3 * times.step
    yield "XLA optimal ms", 1e3 * plan.cost.xla_optimal_secs
    yield "Gflop a core", sum(plan.cost.flops_per_core.values()) / 1e9
    yield "instructions", float(plan.cost.instructions)
    for kind, (count, mib) in sorted(_by_kind(plan.cost).items()):
        yield kind, float(count)
        yield f"{kind} MiB", mib


def _stacked(names: Sequence[str], parts: Mapping[str, Sequence[float]], label: str) -> Figure:
    """Draws a bar for each name; each part has a height for every name."""
    figure = Figure(figsize=(2.5 + 1.2 * len(names), 4.5), layout="constrained")
    axes = figure.subplots()
    bottom = np.zeros(len(names))
    for part, heights in parts.items():
        axes.bar(names, heights, bottom=bottom, label=part)
        bottom = bottom + heights
    axes.set_ylabel(label)
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
