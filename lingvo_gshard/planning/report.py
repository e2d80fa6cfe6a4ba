"""Plans as text, as report.md, side by side, and as pictures after Figures 7 and 8."""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from lingvo_gshard.files import table
from lingvo_gshard.planning.categories import Category
from lingvo_gshard.planning.memory import Memory
from lingvo_gshard.planning.plan import DECODE, PAPERS_SHARE, TRAIN, Plan, ProgramPlan, StepCost
from lingvo_gshard.spmd import topology

PICTURES = "memory.png", "time.png"
# Figure 7's parts, from the bottom of a bar.
_MEMORY_PARTS = ("replicated_weights", "expert_weights", "optimizer_slots", "temporaries")


def write(plan: Plan, folder: pathlib.Path) -> None:
    """Writes folder/report.md, which shows the pictures that `draw` makes."""
    pictures = PICTURES if plan.step.cost else PICTURES[:1]
    images = "\n".join(f"![{name}]({name})" for name in pictures)
    (folder / "report.md").write_text(
        f"# {plan.model} on {plan.topology}\n\n```\n{text(plan)}\n```\n\n{images}\n"
    )


def draw(
    plans: Mapping[str, Plan], folder: pathlib.Path, pictures: tuple[str, str] = PICTURES
) -> None:
    """Draws Figures 7 and 8 into `folder`: bars of training steps' memory and, if they fit, times.

    A bar of memory ends at the peak, so that it has only those temporaries that are beside the
    state then; a dashed line is the capacity. Times are those at the roofline, by category.
    """
    memories = [plan.step.memory_gib for plan in plans.values()]
    bars = dict(zip(plans, map(_memory_parts, memories), strict=True))
    figure = _stacked(bars, f"GiB a {_device(next(iter(plans.values())))}")
    for capacity in {memory.capacity for memory in memories}:
        figure.axes[0].axhline(capacity, color="black", linestyle="--", linewidth=1)
    figure.savefig(folder / pictures[0], dpi=130)
    bars = {name: _time_parts(plan.step.cost) for name, plan in plans.items() if plan.step.cost}
    if bars:
        _stacked(bars, "ms a step at the roofline").savefig(folder / pictures[1], dpi=130)


def comparison(plans: Sequence[Plan]) -> str:
    """Plans side by side; a plan that does not fit has no times."""
    lines = []
    for i, plan in enumerate(plans, 1):
        mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
        rows = ", ".join(f"{letter}:{axis}" for letter, axis in plan.sharding.items())
        parts = [f"{i}: {plan.model} on {plan.topology}, mesh {mesh}", f"table {rows}"]
        lines.append("; ".join([*parts, *plan.settings]))
    columns = {f"{i}: {plan.model}": figures(plan) for i, plan in enumerate(plans, 1)}
    notes = (f"{i}: {each}" for i, plan in enumerate(plans, 1) for each in caveats(plan))
    return "\n".join([*lines, side_by_side(columns), *notes])


def side_by_side(columns: Mapping[str, Mapping[str, float | None]]) -> str:
    """A table of named figures, and the ratio of the last column's figures to the first's."""
    each = list(columns.values())
    rows = [("", *columns, "ratio")]
    for name in dict.fromkeys(itertools.chain(*each)):
        values = [column.get(name) for column in each]
        first, last = values[0], values[-1]
        ratio = last / first if first and last is not None else None
        cells = (table.number(v, ".4g" if v is None or v < 1e4 else ".0f") for v in values)
        rows.append((name, *cells, table.number(ratio, ".3f")))
    return table.text(rows)


def figures(plan: Plan) -> dict[str, float]:
    """The figures of a plan by name, with their units; what does not fit has no times."""
    step = plan.step
    memory, cost = dataclasses.asdict(step.memory_gib), step.cost
    found = {
        "cores": plan.cores,
        "weights B": plan.weights / 1e9,
        "target tokens a core": plan.tokens_per_core,
        "fits": plan.all_fit,
        **{f"{part} GiB": gib for part, gib in memory.items()},
        "lower s": step.lower_secs,
        "compile s": step.compile_secs,
        "compile CPU s": step.compile_cpu_secs,
        "host's peak GiB": plan.host_peak_gib,
    }
    for name, program in plan.programs.items():
        if program is not step:
            found |= {f"{name} {each}": value for each, value in _call_figures(program).items()}
    if cost is None:
        return found
    for part, secs in dataclasses.asdict(cost.roofline_secs).items():
        found[f"roofline {part} ms"] = 1e3 * secs
    for name, times in sorted(cost.roofline_secs_by_category.items()):
        found[f"{name} ms"] = 1e3 * times.step
    found |= {
        "steps/s": plan.steps_per_sec(),
        "M tokens/s": plan.tokens_per_sec() / 1e6,
        "core-years": plan.core_years(),
        "XLA optimal ms": 1e3 * cost.xla_optimal_secs,
        "Gflop a core": sum(cost.flops_per_core.values()) / 1e9,
        "instructions": cost.instructions,
    }
    for kind, (count, mib) in sorted(_by_kind(cost).items()):
        ms = 1e3 * cost.network_secs_by_kind[kind]
        found |= {kind: count, f"{kind} MiB": mib, f"{kind} ms": ms}
    return found


def _call_figures(program: ProgramPlan) -> dict[str, float]:
    """What one call of a program needs, and if it fits, sends and takes."""
    found = {"GiB": program.memory_gib.peak, "compile s": program.compile_secs}
    if program.cost is None:
        return found
    exchanges = _by_kind(program.cost).get("all-to-all", (0, 0.0))[0]
    found |= {"all-to-alls": exchanges, "ms": 1e3 * program.cost.roofline_secs.step}
    rate = program.tokens_per_sec() / 1e3
    return found | {"K tokens/s": rate} if rate else found  # Initialization has no tokens.


def text(plan: Plan) -> str:
    """A plan as one screen of text."""
    step, memory, device = plan.step, plan.step.memory_gib, _device(plan)
    over = memory.peak - memory.capacity
    verdict = plan.verdict if step.fits else f"does NOT fit, by {over:.2f} GiB or more"
    parts = (f"{part.replace('_', ' ')} {getattr(memory, part):.2f}" for part in _MEMORY_PARTS)
    lines = [
        f"{plan.model} on {plan.topology}: {plan.cores} {device}s, {table.count(plan.weights)} "
        f"weights, {plan.tokens_per_core:.0f} target tokens a {device}",
        f"settings: {', '.join(plan.settings) or 'none'}",
        f"{verdict}; a step needs {memory.peak:.2f} of {memory.capacity:.2f} GiB a {device}",
        "  " + ", ".join(parts),
    ]
    for each in step.largest_buffers[:5]:
        lines.append(f"  {each.gib:.3g} GiB {each.shape} of {each.source}")
    if step.cost:
        lines += _cost_lines(plan, step.cost)
    lines.append(
        f"lowered in {step.lower_secs:.1f} s, compiled in {step.compile_secs:.1f} s "
        f"({step.compile_cpu_secs:.1f} of CPU), {plan.host_peak_gib:.1f} GiB of this machine"
    )
    return "\n".join([*lines, programs(plan)])


def programs(plan: Plan) -> str:
    """The table of all programs, and what is remarkable in those besides the training step."""
    columns = ("GiB", "all-to-alls", "ms", "K tokens/s", "compile s")
    rows = [["of a call", "fits", *columns]]
    for name, program in plan.programs.items():
        found = _call_figures(program)
        cells = (table.number(found.get(column), ".5g") for column in columns)
        rows.append([name, "yes" if program.fits else "NO", *cells])
    strange = [
        f"suspicious in {name}: {each}"
        for name, program in plan.programs.items()
        if program is not plan.step
        for each in program.suspicious
    ]
    return "\n".join([table.text(rows, indent="  "), *strange, *caveats(plan)])


def caveats(plan: Plan) -> Iterator[str]:
    """Yields what the times of the programs leave out, or count in full."""
    if plan.bubble:
        yield f"{TRAIN}: counts the pipeline's bubble, {plan.bubble:.1%} of the ticks of a stage"
    for name, program in plan.programs.items():
        for source in program.cost.uncounted_loops if program.cost else ():
            yield f"{name}: a loop of unknown length, counted as one trip, in {source}"
        if name == DECODE and program.fits:
            yield f"{name}: counts all {program.batch.target_len} steps; a search may end earlier"


def _device(plan: Plan) -> str:
    return "GPU" if topology.is_gpu(plan.topology) else "core"


def _cost_lines(plan: Plan, cost: StepCost) -> Iterator[str]:
    yield _collectives(cost, _device(plan))
    for each in plan.step.suspicious or ("nothing",):
        yield f"suspicious: {each}"
    yield _categories(cost)
    yield (
        f"products {sum(cost.flops_per_core.values()) / 1e12:.2f} Tflop a {_device(plan)}, of "
        f"which the mathematics asks for {plan.model_flops_per_core / 1e12:.2f}"
    )
    for share in (1.0, PAPERS_SHARE):
        yield (
            f"at {share:.0%} of the roofline: {cost.roofline_secs.step / share:.3g} s a step, "
            f"{plan.steps_per_sec(share):.2f} steps/s, {plan.tokens_per_sec(share) / 1e6:.2f} M "
            f"tokens/s, {plan.core_years(share):.1f} {_device(plan)}-years for 10^12 tokens"
        )
    yield (
        f"XLA's optimal_seconds {cost.xla_optimal_secs:.3g} s (its loops once: "
        f"{cost.xla_optimal_secs_once:.3g}), {cost.instructions} instructions"
    )


def _collectives(cost: StepCost, device: str) -> str:
    """The table of collectives by kind, with the two sources of the most bytes."""
    rows: list[Sequence[object]] = [(f"collectives of a step on one {device}", "count", "MiB")]
    for kind, (count, mib) in sorted(_by_kind(cost).items(), key=lambda item: -item[1][0]):
        sources = [each.source for each in cost.collectives if each.kind == kind]
        more = f" and {len(sources) - 2} more" if len(sources) > 2 else ""
        rows.append((f"  {kind} from {', '.join(sources[:2])}{more}", count, f"{mib:.1f}"))
    return table.text(rows)


def _by_kind(cost: StepCost) -> dict[str, tuple[int, float]]:
    """The number of collectives of each kind and their MiB."""
    counts, sizes = collections.Counter[str](), collections.Counter[str]()
    for each in cost.collectives:
        counts[each.kind] += each.count
        sizes[each.kind] += each.bytes
    return {kind: (count, sizes[kind] / 2**20) for kind, count in counts.items()}


def _categories(cost: StepCost) -> str:
    """The table of times by category, the longest first."""
    by_category = cost.roofline_secs_by_category
    ranked = sorted(by_category.items(), key=lambda item: -item[1].step)
    flops = cost.flops_per_core | {"all": sum(cost.flops_per_core.values())}
    rows = [["of a step", "Gflop", "compute ms", "memory ms", "network ms", "step ms"]]
    for name, times in [*ranked, ("all", cost.roofline_secs)]:
        cells = (f"{1e3 * secs:.2f}" for secs in dataclasses.astuple(times))
        rows.append([name, f"{flops[name] / 1e9:.0f}", *cells])
    return table.text(rows, indent="  ")


def _memory_parts(memory: Memory) -> dict[str, float]:
    *of_state, temporaries = _MEMORY_PARTS
    parts = {part.replace("_", " "): getattr(memory, part) for part in of_state}
    return parts | {temporaries: max(memory.peak - sum(parts.values()), 0.0)}


def _time_parts(cost: StepCost) -> dict[str, float]:
    parts = {}
    for category in Category:
        times = cost.roofline_secs_by_category.get(category)
        parts[category.replace("_", ", ")] = 1e3 * (times.step - times.network) if times else 0.0
    return parts | {"collectives": 1e3 * cost.roofline_secs.network}


def _stacked(bars: Mapping[str, Mapping[str, float]], label: str) -> Figure:
    """Draws bars by name; all have the same parts, the first at the bottom."""
    figure = Figure(figsize=(2.5 + 1.2 * len(bars), 4.5), layout="constrained")
    axes = figure.subplots()
    bottom = np.zeros(len(bars))
    for part in next(iter(bars.values())):
        heights = [bar[part] for bar in bars.values()]
        axes.bar(list(bars), heights, bottom=bottom, label=part)
        bottom += heights
    axes.set_ylabel(label)
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
