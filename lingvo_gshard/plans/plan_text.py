"""Plans of experiments as text: one on a screen, in Markdown, and several side by side."""

from collections.abc import Iterator, Sequence

from lingvo_gshard.plans.plan import DECODE, TRAIN, Plan
from xla_plan.expected import factors_text
from xla_plan.plans import figures as program_figures
from xla_plan.plans import program_text
from xla_plan.plans.program_plan import ProgramPlan
from xla_plan.plans.program_text import Call
from xla_spmd.files import table

# The pictures that a report shows; plan_pictures.py draws them.
MEMORY_PICTURE = "memory.png"
TIME_PICTURE = "time.png"


def markdown(plan: Plan) -> str:
    """Returns the report of a plan in Markdown, with its pictures."""
    # Times are drawn only for a step that fits. Other programs are not drawn.
    pictures = []
    if plan.has_step:
        pictures.append(MEMORY_PICTURE)
        if plan.step.cost is not None:
            pictures.append(TIME_PICTURE)
    images = "\n".join(f"![{name}]({name})" for name in pictures)
    return f"# {plan.model} on {plan.topology}\n\n```\n{screen(plan)}\n```\n\n{images}\n"


def screen(plan: Plan) -> str:
    """Returns a plan as one screen of text, most of it about the training step.

    Without a training step it describes the first program that was planned.
    """
    name = device(plan)
    title = (
        f"{plan.model} on {plan.topology}: {plan.cores} {name}s, {table.count(plan.weights)} "
        "weights"
    )
    if plan.has_step:
        title += f", {plan.tokens_per_core:.0f} {plan.unit}s a {name}"

    lines = [title, f"settings: {', '.join(plan.settings) or 'none'}"]
    if plan.dispatch is not None:
        lines.append(f"tokens reach their experts by {plan.dispatch}")
    if plan.has_step and plan.remat is not None:
        lines.append(f"gradients recompute activations by remat={plan.remat}")
    lines += program_text.described(plan.main, _call(plan))
    host = f"{plan.host_peak_gib:.1f} GiB of this machine"
    lines.append(f"{program_text.compilation(plan.main)}, {host}")
    lines.append(programs(plan))
    return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """Returns whether all programs fit, or which of them do not."""
    if plan.all_fit:
        return "fits"
    unfit = [name for name, program in plan.programs.items() if not program.fits]
    return f"does NOT fit: {', '.join(unfit)}"


def device(plan: Plan) -> str:
    """Returns the word for a plan's devices."""
    return program_text.device(plan.topology)


def _call(plan: Plan) -> Call:
    """Returns the words for a call of the main program."""
    if plan.has_step:
        return Call(
            name="step",
            outcome=verdict(plan),
            expected="expected",
            model_flops=plan.model_flops_per_core,
            rates=lambda share: _rates(plan, share),
        )
    return Call(
        name=f"call of {plan.main.name}",
        outcome=verdict(plan),
        expected="",  # Only training steps are published.
        rates=lambda share: f"{_amount(share * plan.main.tokens_per_sec())}{plan.noun}s/s",
    )


def programs(plan: Plan) -> str:
    """Returns the table of all programs, and remarks on all except the main one."""
    columns = ("GiB", "all-to-alls", "ms", f"K {plan.noun}s/s", "compile s")
    rows = [["of a call", "fits", *columns]]
    for name, program in plan.programs.items():
        call = _call_figures(program, plan.noun)
        cells = [table.number(call.get(column), ".5g") for column in columns]
        rows.append([name, "yes" if program.fits else "NO", *cells])
    lines = [table.text(rows, indent="  ")]

    # The main program's suspicious parts are listed among its collectives.
    for name, program in plan.programs.items():
        if program is not plan.main:
            lines += [f"suspicious in {name}: {text}" for text in program.suspicious]
    lines += caveats(plan)
    return "\n".join(lines)


def caveats(plan: Plan) -> Iterator[str]:
    """Yields the parts that the times of the programs leave out, or count in full."""
    if plan.bubble and plan.has_step:
        yield f"{TRAIN}: counts the pipeline's bubble, {plan.bubble:.1%} of the ticks of a stage"

    for name, program in plan.programs.items():
        if program.cost is not None:
            for caveat in program_text.caveats(program.cost):
                yield f"{name}: {caveat}"
        if name == DECODE and program.fits and program.batch is not None:
            yield f"{name}: counts all {program.batch.target_len} steps; a search may end earlier"


def comparison(plans: Sequence[Plan | ProgramPlan]) -> str:
    """Returns plans side by side, without the times of programs that do not fit."""
    # The columns have a number and a name, which the lines above explain.
    lines = []
    columns = {}
    notes = []
    for number, plan in enumerate(plans, 1):
        mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
        place = f"on {plan.topology}, mesh {mesh}"
        if isinstance(plan, Plan):
            rows = ", ".join(f"{letter}:{axis}" for letter, axis in plan.sharding.items())
            title = f"{number}: {plan.model} {place}"
            lines.append("; ".join([title, f"table {rows}", *plan.settings]))
            columns[f"{number}: {plan.model}"] = figures(plan)
            notes += [f"{number}: {caveat}" for caveat in caveats(plan)]
        else:
            lines.append(f"{number}: {plan.name} {place}")
            columns[f"{number}: {plan.name}"] = program_figures.of_program(plan)
            if plan.cost is not None:
                notes += [f"{number}: {caveat}" for caveat in program_text.caveats(plan.cost)]

    notes += expectations(plans)
    return "\n".join([*lines, program_figures.side_by_side(columns), *notes])


def expectations(plans: Sequence[Plan | ProgramPlan]) -> list[str]:
    """Returns the basis of the expected times, a line for each machine with an expected time."""
    lines = []
    for plan in plans:
        if isinstance(plan, Plan) and not plan.has_step:
            continue
        step = plan.step if isinstance(plan, Plan) else plan
        if step.cost is not None:
            lines.append(factors_text.basis(step.topology, step.shares))
    return list(dict.fromkeys(lines))


def figures(plan: Plan) -> dict[str, float]:
    """Returns the figures of a plan by name, with units; times only of programs that fit."""
    # The size of the task, and the memory that a step needs.
    step = plan.step if plan.has_step else None
    named: dict[str, float] = {"cores": plan.cores, "weights B": plan.weights / 1e9}
    if step is not None:
        named[f"{plan.unit}s a core"] = plan.tokens_per_core
    named["fits"] = plan.all_fit
    if step is not None:
        named |= program_figures.memory(step)
    named["host's peak GiB"] = plan.host_peak_gib

    # The other programs have fewer figures, and the step has all of them.
    for program_name, program in plan.programs.items():
        if program_name != TRAIN:
            for name, value in _call_figures(program, plan.noun).items():
                named[f"{program_name} {name}"] = value

    if step is not None and step.fits:
        named |= program_figures.times(step)
        named["steps/s"] = plan.steps_per_sec()
        named[f"M {plan.noun}s/s"] = plan.tokens_per_sec() / 1e6
        named["core-years"] = plan.core_years()
        named |= program_figures.work(step)
    return named


def _call_figures(program: ProgramPlan, noun: str) -> dict[str, float]:
    """Returns the memory of a call of a program, and if it fits, its collectives and its time.

    `noun` is the unit of its rows.
    """
    named = {"GiB": program.memory_gib.peak, "compile s": program.compile_secs}
    if program.cost is None:
        return named

    # AllToAlls alone are counted here: tokens on their way to experts and back.
    named["all-to-alls"] = program_figures.counts_by_kind(program.cost)["all-to-all"]
    named["ms"] = 1e3 * program.cost.step_secs

    rate = program.tokens_per_sec()
    if rate:  # Initialization does not process tokens.
        named[f"K {noun}s/s"] = rate / 1e3
    return named


def _rates(plan: Plan, share: float) -> str:
    """Returns the rates at a share of the roofline, and the cost of a training at that rate."""
    steps = plan.steps_per_sec(share)
    steps_text = f"{steps:.2f}" if steps >= 1 else f"{steps:.3g}"
    return (
        f"{steps_text} steps/s, {_amount(plan.tokens_per_sec(share))}{plan.noun}s/s, "
        f"{plan.core_years(share):.1f} {device(plan)}-years for 10^12 {plan.noun}s"
    )


def _amount(value: float) -> str:
    """Returns a number with three digits and a unit: `2.10 M `, `73.7 K `, `512 `."""
    if value >= 1e6:
        return f"{value / 1e6:.2f} M "
    if value >= 1e3:
        return f"{value / 1e3:.1f} K "
    return f"{value:.0f} "
