"""Published steps beside their plans, as text."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from repro.published import fits
from repro.published.steps import Step
from xla_plan.expected import factors
from xla_plan.expected.factors import Factor
from xla_spmd.files import table

_TITLE = """\
Published training steps beside their plans. A bound is the time at the roofline; products is the
time of the matrix products alone; share is the bound over the measured time. Expected times
follow from the machine's rates, which are fitted to half of its steps; off is their error.
Steps with a * are not counted among the bounds, for the reasons below, and belong to neither
half."""


def progress_line(step: Step) -> str:
    """Returns the outcome of one step in a line."""
    if step.cost is None:
        return f"{step.id} on {step.topology}: does not fit"
    measured = "" if step.measured_secs is None else f", measured {_ms(step.measured_secs)} ms"
    return (
        f"{step.id} on {step.topology}: bound {_ms(step.cost.step_secs)} ms{measured}, compiled "
        f"in {step.compile_secs:.0f} s"
    )


def tables(steps: Sequence[Step]) -> str:
    """Returns a Markdown table for each machine, a table of memory, and the differences."""
    machines = sorted({step.machine for step in steps})
    bounds = [step.bound for step in steps]
    by_machine = factors.by_machine([bound for bound in bounds if bound is not None])

    parts = [_TITLE]
    for machine in machines:
        own = [step for step in steps if step.machine == machine and step.measured_secs]
        if own:
            parts.append(f"## {machine}\n\n{_table(own, by_machine.get(machine))}")
            parts += _summary(machine, own)
    parts.append(fits.text(by_machine))
    parts.append(_memory(steps))
    parts.append("\n".join(_remarks(steps)))
    return "\n\n".join(parts)


def _table(steps: Sequence[Step], factor: Factor | None) -> str:
    """Returns the table of a machine's steps, with expected times if there is a factor."""
    header = ["step", "topology", "devices", "products ms", "bound ms", "measured ms", "share"]
    rows = [[*header, "expected ms", "off", "half"]]
    for step in steps:
        name = step.id if step.no_bound is None else f"{step.id} *"
        row = [name, step.topology, str(step.devices)]
        if step.cost is None:
            row += ["does not fit", "does not fit"]
        else:
            row += [_ms(step.cost.roofline_secs.compute), _ms(step.cost.step_secs)]
        row += [_ms(step.measured_secs), table.number(step.share)]
        rows.append([*row, *_expected_cells(step, factor)])
    return table.markdown(rows)


def _expected_cells(step: Step, factor: Factor | None) -> list[str]:
    """Returns a step's expected time, its error, and the half of the records that it is in."""
    if factor is None or step.cost is None or step.measured_secs is None:
        return ["-", "-", "-"]

    own = dataclasses.replace(factor, shares=step.shares)
    expected_secs = own.expected(step.cost.step_secs).secs
    half = "-"
    if step.bound in factor.fitted:
        half = "fitted"
    elif step.bound in factor.held_out:
        half = "held out"
    return [_ms(expected_secs), f"{expected_secs / step.measured_secs - 1:+.0%}", half]


def _memory(steps: Sequence[Step]) -> str:
    """Returns whether plans fit where runs did, and the steps of sources with failed runs."""
    sources = {step.source for step in steps if not step.ran}
    rows = [["step", "topology", "GiB", "capacity", "the plan", "published"]]
    for step in steps:
        if step.source in sources:
            gib = [f"{step.gib:.1f}", f"{step.capacity_gib:.1f}"]
            ran = "ran" if step.ran else "out of memory"
            verdict = "does not fit" if step.cost is None else "fits"
            rows.append([step.id, step.topology, *gib, verdict, ran])

    agreeing = [step for step in steps if step.ran == (step.cost is not None)]
    failed = [step for step in steps if not step.ran]
    lines = [
        f"## Memory\n\nOf {len(steps)} steps, {len(failed)} of which ran out of memory, "
        f"{len(agreeing)} have a plan that agrees."
    ]
    if failed:
        lines.append(table.markdown(rows))
    others = [step for step in steps if step not in agreeing and step.source not in sources]
    for step in others:
        lines.append(
            f"- {step.id} ran, and its plan needs {step.gib:.1f} of {step.capacity_gib:.1f} GiB."
        )
    return "\n\n".join(lines)


def _summary(machine: str, steps: Sequence[Step]) -> Iterator[str]:
    """Yields the range of the shares of the bounds, and why some plans are not bounds."""
    bounds = [step.bound for step in steps]
    shares = sorted(bound.bound_secs / bound.measured_secs for bound in bounds if bound is not None)
    if len(shares) == 1:
        yield f"{machine}: 1 bound, {shares[0]:.2f} of the measured time."
    elif shares:
        yield (
            f"{machine}: {len(shares)} bounds, {shares[0]:.2f} to {shares[-1]:.2f} of the measured "
            f"time, median {statistics.median(shares):.2f}."
        )
    reasons = dict.fromkeys(step.no_bound for step in steps if step.no_bound is not None)
    if reasons:
        yield "\n".join(f"* not among the bounds: {reason}" for reason in reasons)


def _remarks(steps: Sequence[Step]) -> Iterator[str]:
    """Yields a line for each source, with the differences of its rebuilt steps."""
    by_source: dict[str, dict[str, None]] = {}
    for step in steps:
        by_source.setdefault(step.source, {}).update(dict.fromkeys(step.differs))
    for source, differences in by_source.items():
        what = f" Here: {'; '.join(differences)}." if differences else ""
        yield f"- {source}.{what}"


def _ms(secs: float | None) -> str:
    """Returns milliseconds with five digits, or all digits of a larger number."""
    millis = None if secs is None else 1e3 * secs
    return table.number(millis, ".5g" if millis is None or millis < 1e5 else ".0f")
