"""A plan as one screen of text, as report.md, and as pictures after Figures 7 and 8."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.figure import Figure

from lingvo_gshard.planning.categories import Category
from lingvo_gshard.planning.memory import Memory
from lingvo_gshard.planning.plan import PAPERS_SHARE, Cost, Plan
from lingvo_gshard.planning.roofline import NOTHING

MEMORY_PNG, TIME_PNG, REPORT_MD = "memory.png", "time.png", "report.md"

# Figure 7's parts, from the bottom.
_MEMORY_PARTS = ("replicated_weights", "expert_weights", "optimizer_slots", "temporaries")
_NUM_LINES = 5


def text(plan: Plan) -> str:
    """One screen."""
    return "\n".join(
        [
            f"{plan.model} on {plan.topology}: {plan.cores} cores, {_count(plan.weights)} weights, "
            f"{plan.tokens_per_core:.0f} target tokens a core",
            *(["settings: " + ", ".join(plan.settings)] if plan.settings else []),
            *_memory_lines(plan),
            *(_cost_lines(plan, plan.cost) if plan.cost else []),
            f"lowered in {plan.lower_secs:.1f} s, compiled in {plan.compile_secs:.1f} s "
            f"({plan.compile_cpu_secs:.1f} of CPU), "
            f"{plan.host_peak_gib:.1f} GiB of this machine",
        ]
    )


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


def draw_memory(memories: Mapping[str, Memory], path: pathlib.Path) -> None:
    """Figure 7: GiB of a core, stacked, a bar a plan; dashed, what the core has."""
    parts = {
        part.replace("_", " "): [getattr(memory, part) for memory in memories.values()]
        for part in _MEMORY_PARTS
    }
    figure = _stacked(list(memories), parts, "GiB a core")
    for capacity in {memory.capacity for memory in memories.values()}:
        figure.axes[0].axhline(capacity, color="black", linestyle="--", linewidth=1)
    figure.savefig(path, dpi=130)


def draw_times(costs: Mapping[str, Cost], path: pathlib.Path) -> None:
    """Figure 8: the roofline's milliseconds by category, stacked, a bar a plan."""
    parts = {
        each.value.replace("_", ", "): [_local_ms(cost, each) for cost in costs.values()]
        for each in Category
    }
    parts["collectives"] = [1e3 * cost.roofline_secs.network for cost in costs.values()]
    _stacked(list(costs), parts, "ms a step at the roofline").savefig(path, dpi=130)


def _local_ms(cost: Cost, category: Category) -> float:
    times = cost.roofline_secs_by_category.get(category.value, NOTHING)
    return 1e3 * (times.step - times.network)


def _stacked(names: Sequence[str], parts: Mapping[str, Sequence[float]], label: str) -> Figure:
    """A bar for each name, of its part of every list of `parts`."""
    figure = Figure(figsize=(2.5 + 1.2 * len(names), 4.5), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(names)
    for part, heights in parts.items():
        axes.bar(names, heights, bottom=bottoms, label=part)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel(label)
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _count(weights: int) -> str:
    """In millions below a tenth of a billion."""
    return f"{weights / 1e9:.2f} B" if weights >= 1e8 else f"{weights / 1e6:.2f} M"


def _memory_lines(plan: Plan) -> Iterator[str]:
    memory = plan.memory_gib
    over = memory.peak - memory.capacity
    verdict = "fits" if plan.fits else f"does NOT fit, by {over:.2f} GiB or more"
    yield f"{verdict}: {memory.peak:.2f} of {memory.capacity:.2f} GiB a core"
    parts = (f"{part.replace('_', ' ')} {getattr(memory, part):.2f}" for part in _MEMORY_PARTS)
    yield "  " + ", ".join(parts)
    for buffer in plan.largest_buffers[:_NUM_LINES]:
        yield f"  {buffer.gib:.3g} GiB {buffer.shape} of {buffer.source}"


def _cost_lines(plan: Plan, cost: Cost) -> Iterator[str]:
    yield "collectives of a step on one core"
    yield from _collective_lines(cost)
    for each in plan.suspicious or ("nothing",):
        yield f"suspicious: {each}"
    yield from _category_lines(cost)
    secs = cost.roofline_secs
    yield (
        f"products {sum(cost.flops_per_core.values()) / 1e12:.2f} Tflop a core, of which the "
        f"mathematics asks for {cost.model_flops_per_core / 1e12:.2f}"
    )
    for share in (1.0, PAPERS_SHARE):
        yield (
            f"at {share:.0%} of the roofline: {secs.step / share:.3g} s a step, "
            f"{plan.steps_per_sec(share):.2f} steps/s, {plan.tokens_per_sec(share) / 1e6:.2f} M "
            f"tokens/s, {plan.core_years(share):.1f} core-years for 10^12 tokens"
        )
    yield (
        f"XLA's optimal_seconds {cost.xla_optimal_secs:.3g} s (its loops once: "
        f"{cost.xla_optimal_secs_once:.3g}), {cost.instructions} instructions"
    )


def _collective_lines(cost: Cost) -> Iterator[str]:
    counts, sizes = collections.Counter[str](), collections.Counter[str]()
    sources: dict[str, list[str]] = collections.defaultdict(list)
    for each in cost.collectives:
        counts[each.kind] += each.count
        sizes[each.kind] += each.bytes
        sources[each.kind].append(each.source)
    for kind, count in counts.most_common():
        yield (f"  {kind:<20} {count:>5} {sizes[kind] / 2**20:>10.1f} MiB  {_first(sources[kind])}")


def _first(names: Sequence[str]) -> str:
    rest = len(names) - 2
    return ", ".join(names[:2]) + (f" and {rest} more" if rest > 0 else "")


def _category_lines(cost: Cost) -> Iterator[str]:
    line = "  {:<18} {:>9} {:>10} {:>10} {:>10} {:>10}".format
    yield line("of a step", "Gflop", "compute ms", "memory ms", "network ms", "step ms")
    rows = [
        (name, cost.flops_per_core[name], times)
        for name, times in cost.roofline_secs_by_category.items()
    ]
    rows.sort(key=lambda row: -row[2].step)
    rows.append(("all", sum(cost.flops_per_core.values()), cost.roofline_secs))
    for name, flops, times in rows:
        secs = (times.compute, times.memory, times.network, times.step)
        yield line(name, f"{flops / 1e9:.0f}", *(f"{1e3 * each:.2f}" for each in secs))
