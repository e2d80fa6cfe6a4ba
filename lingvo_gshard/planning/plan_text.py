"""Plans as text: one on a screen, in Markdown, and several side by side."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gshard.files import table
from lingvo_gshard.planning.plan import (
    DECODE,
    TRAIN,
    Buffer,
    Plan,
    ProgramPlan,
    StepCost,
    Times,
)
from lingvo_gshard.planning.published import factors_text
from lingvo_gshard.spmd import topology

# The pictures that a report shows; plan_pictures.py draws them.
MEMORY_PICTURE = "memory.png"
TIME_PICTURE = "time.png"

_NUM_BUFFERS = 5  # How many of the largest a screen shows.
_NUM_SOURCES = 2  # How many layers a row of collectives names.


def markdown(plan: Plan) -> str:
    """Returns the report of a plan in Markdown, with its pictures."""
    # A step that does not fit has no times to draw, and nothing is drawn of other programs.
    pictures = []
    if plan.has_step:
        pictures.append(MEMORY_PICTURE)
        if plan.step.cost is not None:
            pictures.append(TIME_PICTURE)
    images = "\n".join(f"![{name}]({name})" for name in pictures)
    return f"# {plan.model} on {plan.topology}\n\n```\n{screen(plan)}\n```\n\n{images}\n"


def screen(plan: Plan) -> str:
    """Returns a plan as one screen of text, most of it of the training step.

    Without a training step it is of the first program that was planned.
    """
    main = plan.programs[plan.main]
    memory = main.memory_gib
    name = device(plan)

    # Which experiment, and whether it fits.
    title = (
        f"{plan.model} on {plan.topology}: {plan.cores} {name}s, {table.count(plan.weights)} "
        "weights"
    )
    if plan.has_step:
        title += f", {plan.tokens_per_core:.0f} {plan.unit}s a {name}"
    outcome = verdict(plan)
    if not main.fits:
        outcome = f"does NOT fit, by {memory.peak - memory.capacity:.2f} GiB or more"
    lines = [
        title,
        f"settings: {', '.join(plan.settings) or 'none'}",
        f"{outcome}; {_call(plan)} needs {memory.peak:.2f} of {memory.capacity:.2f} GiB a {name}",
        f"  replicated weights {memory.replicated_weights:.2f}, "
        f"expert weights {memory.expert_weights:.2f}, "
        f"optimizer slots {memory.optimizer_slots:.2f}, temporaries {memory.temporaries:.2f}",
    ]
    # What to shrink if it does not fit.
    lines += [_buffer_line(buffer) for buffer in main.largest_buffers[:_NUM_BUFFERS]]

    # What a call takes, and what planning it took.
    if main.cost is not None:
        lines += _cost_lines(plan, main.cost)
        if plan.has_step:
            lines += _training_lines(plan, main.cost)
        else:
            rate = f"{_amount(main.tokens_per_sec())}{plan.noun}s/s"
            lines.append(f"bound, at the roofline: {main.cost.step_secs:.3g} s a call, {rate}")
        lines.append(_size_line(main.cost))
    lines.append(
        f"lowered in {main.lower_secs:.1f} s, compiled in {main.compile_secs:.1f} s "
        f"({main.compile_cpu_secs:.1f} of CPU), {plan.host_peak_gib:.1f} GiB of this machine"
    )

    lines.append(programs(plan))
    return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """Returns whether all programs fit, or which of them do not."""
    if plan.all_fit:
        return "fits"
    unfit = [name for name, program in plan.programs.items() if not program.fits]
    return f"does NOT fit: {', '.join(unfit)}"


def device(plan: Plan) -> str:
    """Returns what a plan's devices are called."""
    return "GPU" if topology.is_gpu(plan.topology) else "core"


def _call(plan: Plan) -> str:
    """Returns what one run of the main program is called."""
    return "a step" if plan.has_step else f"a call of {plan.main}"


def programs(plan: Plan) -> str:
    """Returns the table of all programs, and what is remarkable in those besides the main one."""
    columns = ("GiB", "all-to-alls", "ms", f"K {plan.noun}s/s", "compile s")
    rows = [["of a call", "fits", *columns]]
    for name, program in plan.programs.items():
        program_figures = _program_figures(program, plan.noun)
        cells = [table.number(program_figures.get(column), ".5g") for column in columns]
        rows.append([name, "yes" if program.fits else "NO", *cells])
    lines = [table.text(rows, indent="  ")]

    # What is suspicious in the main program has its place among its collectives.
    for name, program in plan.programs.items():
        if name != plan.main:
            lines += [f"suspicious in {name}: {text}" for text in program.suspicious]
    lines += caveats(plan)
    return "\n".join(lines)


def caveats(plan: Plan) -> Iterator[str]:
    """Yields what the times of the programs leave out, or count in full."""
    if plan.bubble and plan.has_step:
        yield f"{TRAIN}: counts the pipeline's bubble, {plan.bubble:.1%} of the ticks of a stage"

    for name, program in plan.programs.items():
        if program.cost is not None:
            for layer in program.cost.uncounted_loops:
                yield f"{name}: a loop of unknown length, counted as one trip, in {layer}"
            for kernel in program.cost.uncounted_kernels:
                yield (
                    f"{name}: what the kernel {kernel} computes is not counted, as it has no "
                    "cost_estimate"
                )
        if name == DECODE and program.fits:
            yield f"{name}: counts all {program.batch.target_len} steps; a search may end earlier"


def comparison(plans: Sequence[Plan]) -> str:
    """Returns plans side by side; one that does not fit has no times."""
    lines = []
    columns = {}
    notes = []
    for number, plan in enumerate(plans, 1):
        # The columns have a number and a name; above them stands what they are of.
        mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
        rows = ", ".join(f"{letter}:{axis}" for letter, axis in plan.sharding.items())
        title = f"{number}: {plan.model} on {plan.topology}, mesh {mesh}"
        lines.append("; ".join([title, f"table {rows}", *plan.settings]))

        columns[f"{number}: {plan.model}"] = figures(plan)
        notes += [f"{number}: {caveat}" for caveat in caveats(plan)]

    notes += expectations(plans)
    return "\n".join([*lines, side_by_side(columns), *notes])


def expectations(plans: Sequence[Plan]) -> list[str]:
    """Returns what the expected times rest on, a line for each machine that has a time at all."""
    lines = []
    for plan in plans:
        if plan.has_step and plan.step.cost is not None:
            lines.append(factors_text.basis(plan.topology))
    return list(dict.fromkeys(lines))


def side_by_side(columns: Mapping[str, Mapping[str, float | None]]) -> str:
    """Returns a table of named figures, with the ratio of the last column's to the first's."""
    # A figure that some columns lack has its place where the first that has it puts it.
    names: dict[str, None] = {}
    for column in columns.values():
        names |= dict.fromkeys(column)

    rows = [("", *columns, "ratio")]
    for name in names:
        values = [column.get(name) for column in columns.values()]
        first = values[0]
        last = values[-1]
        ratio = last / first if first and last is not None else None
        cells = [_figure_cell(value) for value in values]
        rows.append((name, *cells, table.number(ratio, ".3f")))
    return table.text(rows)


def figures(plan: Plan) -> dict[str, float]:
    """Returns the figures of a plan by name, with units; what does not fit has no times."""
    # The size of the task, and the memory that a step needs.
    step = plan.step if plan.has_step else None
    named: dict[str, float] = {"cores": plan.cores, "weights B": plan.weights / 1e9}
    if step is not None:
        named[f"{plan.unit}s a core"] = plan.tokens_per_core
    named["fits"] = plan.all_fit
    if step is not None:
        for part, gib in dataclasses.asdict(step.memory_gib).items():
            named[f"{part} GiB"] = gib
        # What planning took on this machine.
        named["lower s"] = step.lower_secs
        named["compile s"] = step.compile_secs
        named["compile CPU s"] = step.compile_cpu_secs
    named["host's peak GiB"] = plan.host_peak_gib

    # The other programs have fewer figures, and the step has all of them.
    for program_name, program in plan.programs.items():
        if program_name != TRAIN:
            for name, value in _program_figures(program, plan.noun).items():
                named[f"{program_name} {name}"] = value

    if step is not None and step.cost is not None:
        named |= _cost_figures(plan, step.cost)
    return named


def _cost_figures(plan: Plan, cost: StepCost) -> dict[str, float]:
    """Returns the times and rates of a training step, what it computes, and what it sends."""
    # The roofline, by resource and by category.
    named: dict[str, float] = {}
    for resource, secs in dataclasses.asdict(cost.roofline_secs).items():
        named[f"roofline {resource} ms"] = 1e3 * secs
    for category, times in sorted(cost.roofline_secs_by_category.items()):
        named[f"{category} ms"] = 1e3 * times.step

    if cost.overlapped_secs:
        named["overlapped ms"] = 1e3 * cost.overlapped_secs

    # What others came to on this machine.
    if plan.factor is not None:
        expected = plan.factor.expected(cost.step_secs)
        named["expected ms"] = 1e3 * expected.secs
        named["expected, at least ms"] = 1e3 * expected.least_secs
        named["expected, at most ms"] = 1e3 * expected.most_secs

    # Rates that follow from the roofline, and the size of the program.
    named["steps/s"] = plan.steps_per_sec()
    named[f"M {plan.noun}s/s"] = plan.tokens_per_sec() / 1e6
    named["core-years"] = plan.core_years()
    if cost.xla_optimal_secs:
        named["XLA optimal ms"] = 1e3 * cost.xla_optimal_secs
    named["Gflop a core"] = sum(cost.flops_per_core.values()) / 1e9
    named["recomputed % of flops"] = 100 * cost.recomputed_flops_share
    named["recomputed % of ms"] = 100 * cost.recomputed_time_share
    named["instructions"] = cost.instructions

    # Collectives, alphabetically, so that tables of several models have them in one order.
    for kind, total in sorted(_by_kind(cost).items()):
        named[kind] = total.count
        named[f"{kind} MiB"] = total.mib
        named[f"{kind} ms"] = 1e3 * cost.network_secs_by_kind[kind]
    return named


def _program_figures(program: ProgramPlan, noun: str) -> dict[str, float]:
    """Returns what one call of a program needs, and if it fits, sends and takes.

    `noun` is what its rows are counted in.
    """
    named = {"GiB": program.memory_gib.peak, "compile s": program.compile_secs}
    if program.cost is None:
        return named

    # AllToAlls alone are counted here: tokens on their way to experts and back.
    exchanges = _by_kind(program.cost).get("all-to-all", _KindTotal())
    named["all-to-alls"] = exchanges.count
    named["ms"] = 1e3 * program.cost.step_secs

    rate = program.tokens_per_sec()
    if rate:  # Initialization has no tokens.
        named[f"K {noun}s/s"] = rate / 1e3
    return named


def _figure_cell(value: float | None) -> str:
    """Returns a figure with four digits, or all of a larger number."""
    spec = ".0f" if value is not None and value >= 1e4 else ".4g"
    return table.number(value, spec)


def _buffer_line(buffer: Buffer) -> str:
    return f"  {buffer.gib:.3g} GiB {buffer.shape} of {buffer.source}"


def _cost_lines(plan: Plan, cost: StepCost) -> Iterator[str]:
    """Yields what the main program sends and computes, and where its time goes."""
    # What it sends.
    name = device(plan)
    yield _collectives(plan, cost)
    for description in plan.programs[plan.main].suspicious or ("nothing",):
        yield f"suspicious: {description}"

    # What it computes, where its time goes, and in training how much of the products is needed.
    yield _categories(plan, cost)
    products = f"products {sum(cost.flops_per_core.values()) / 1e12:.2f} Tflop a {name}"
    if plan.has_step:
        products += f", of which the mathematics asks for {plan.model_flops_per_core / 1e12:.2f}"
    yield products
    if plan.has_step:
        yield (
            f"recomputed for the gradient: {cost.recomputed_flops_share:.0%} of the products, "
            f"{cost.recomputed_time_share:.0%} of the roofline's time"
        )
    if cost.overlapped_secs:
        yield (
            f"beside computation, by the schedule: {1e3 * cost.overlapped_secs:.2f} of "
            f"{1e3 * cost.roofline_secs.network:.2f} ms of the network"
        )


def _training_lines(plan: Plan, cost: StepCost) -> Iterator[str]:
    """Yields how fast a run trains if all is at its peak, and if it comes as near as others did."""
    yield f"bound, at the roofline: {cost.step_secs:.3g} s a step, {_rates(plan, 1.0)}"
    factor = plan.factor
    if factor is not None:
        secs = factors_text.expected_secs(factor, cost.step_secs)
        yield f"expected: {secs}, {_rates(plan, factor.value)}"
    yield factors_text.basis(plan.topology)


def _size_line(cost: StepCost) -> str:
    """Returns how large the compiled program is, with its time by XLA, if XLA gives one."""
    size = f"{cost.instructions} instructions"
    if not cost.xla_optimal_secs:
        return size
    return (
        f"XLA's optimal_seconds {cost.xla_optimal_secs:.3g} s (its loops once: "
        f"{cost.xla_optimal_secs_once:.3g}), {size}"
    )


def _rates(plan: Plan, share: float) -> str:
    """Returns the rates at a share of the roofline, and what a training costs then."""
    steps = plan.steps_per_sec(share)
    steps_text = f"{steps:.2f}" if steps >= 1 else f"{steps:.3g}"
    return (
        f"{steps_text} steps/s, {_amount(plan.tokens_per_sec(share))}{plan.noun}s/s, "
        f"{plan.core_years(share):.1f} {device(plan)}-years for 10^12 {plan.noun}s"
    )


def _amount(value: float) -> str:
    """Returns a number with the unit that leaves it three digits: `2.10 M `, `73.7 K `, `512 `."""
    if value >= 1e6:
        return f"{value / 1e6:.2f} M "
    if value >= 1e3:
        return f"{value / 1e3:.1f} K "
    return f"{value:.0f} "


@dataclasses.dataclass
class _KindTotal:
    """All collectives of a kind in a call."""

    count: int = 0
    num_bytes: int = 0
    layers: list[str] = dataclasses.field(default_factory=list)  # Most bytes first.

    @property
    def mib(self) -> float:
        return self.num_bytes / 2**20


def _by_kind(cost: StepCost) -> dict[str, _KindTotal]:
    totals: dict[str, _KindTotal] = collections.defaultdict(_KindTotal)
    for collective_sum in cost.collectives:
        total = totals[collective_sum.kind]
        total.count += collective_sum.count
        total.num_bytes += collective_sum.bytes
        total.layers.append(collective_sum.source)
    return dict(totals)


def _collectives(plan: Plan, cost: StepCost) -> str:
    """Returns the table of collectives by kind, with the layers of the most bytes."""
    ranked = sorted(_by_kind(cost).items(), key=lambda item: -item[1].count)

    title = f"collectives of {_call(plan)} on one {device(plan)}"
    rows: list[Sequence[object]] = [(title, "count", "MiB")]
    for kind, total in ranked:
        layers = ", ".join(total.layers[:_NUM_SOURCES])
        if len(total.layers) > _NUM_SOURCES:
            layers += f" and {len(total.layers) - _NUM_SOURCES} more"
        rows.append((f"  {kind} from {layers}", total.count, f"{total.mib:.1f}"))
    return table.text(rows)


def _categories(plan: Plan, cost: StepCost) -> str:
    """Returns the table of flops and times by category, the longest first."""
    ranked = sorted(cost.roofline_secs_by_category.items(), key=lambda item: -item[1].step)
    of_what, all_ms = ("of a step", "step ms") if plan.has_step else ("of a call", "call ms")
    rows = [[of_what, "Gflop", "compute ms", "memory ms", "network ms", all_ms]]
    for name, secs in ranked:
        rows.append([name, *_category_cells(cost.flops_per_core[name], secs)])

    all_flops = sum(cost.flops_per_core.values())
    rows.append(["all", *_category_cells(all_flops, cost.roofline_secs)])
    return table.text(rows, indent="  ")


def _category_cells(flops: float, secs: Times) -> list[str]:
    millis = [f"{1e3 * value:.2f}" for value in dataclasses.astuple(secs)]
    return [f"{flops / 1e9:.0f}", *millis]
