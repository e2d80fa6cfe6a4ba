"""Expected times as text: what they rest on, in a line, and the fits of all machines."""

import statistics
from collections.abc import Mapping, Sequence

from lingvo_gshard.files import table
from lingvo_gshard.planning.published import factors
from lingvo_gshard.planning.published.factors import Factor

# Predictions are meant to be as near to what was measured as this.
_AIM = 0.25

_TITLE = """\
The factor is the geometric mean of the shares of the bounds that fitted steps reach, and the band
their lowest and highest. Errors are those of expected over measured times, the median without sign;
"one left out" predicts each step by all others of its machine, and the last columns do so by the
time of products alone in place of the bound."""


def basis(topology: str) -> str:
    """Returns in one line what the expected times on a topology rest on, or that there are none.

    Raises ValueError as factors.read.
    """
    machine = topology.partition(":")[0]
    factor = factors.of_topology(topology)
    if factor is None:
        return f"expected on {machine}: unknown, for want of published steps; the bound is all"

    steps = "1 published training step"
    if len(factor.fitted) > 1:
        steps = f"{len(factor.fitted)} published training steps"

    # Other sizes than theirs may come less near to their bounds.
    secs = [record.measured_secs for record in factor.fitted]
    devices = [record.devices for record in factor.fitted]
    line = (
        f"expected on {machine}: the bound over {factor.value:.2f}, as {steps} of "
        f"{', '.join(factor.projects)} ({_range(secs, '.3g')} s, {_range(devices, 'd')} devices) "
        f"reached {_range([factor.lowest, factor.highest], '.2f')} of it"
    )

    # How good it was where it could be tried.
    if factor.held_out:
        errors = [factor.error(record) for record in factor.held_out]
        line += f"; {len(errors)} held out: {_range(errors, '+.0%')} off"
    return line


def expected_secs(factor: Factor, bound_secs: float, call: str = "step") -> str:
    """Returns expected seconds and their band, such as `0.58 s a step (0.5 to 0.65)`."""
    expected = factor.expected(bound_secs)
    band = f"{expected.least_secs:.3g} to {expected.most_secs:.3g}"
    if len(factor.fitted) == 1:
        band = "no band"
    return f"{expected.secs:.3g} s a {call} ({band})"


def fits(by_machine: Mapping[str, Factor]) -> str:
    """Returns the fits of all machines as a Markdown table, and where they miss the aim."""
    rows: list[Sequence[object]] = [
        (
            "machine",
            "fitted",
            "held out",
            "factor",
            "band",
            "fitted: median",
            "largest",
            "held out: median",
            "largest",
            "in the band",
            "one left out: median",
            "largest",
            "by products alone: median",
            "largest",
        )
    ]
    for machine, factor in by_machine.items():
        fitted = []
        if len(factor.fitted) > 1:  # A factor of one record has no error there.
            fitted = [factor.error(record) for record in factor.fitted]
        held_out = [factor.error(record) for record in factor.held_out]
        left_out = list(factor.left_out_errors().values())
        rows.append(
            (
                machine,
                len(factor.fitted),
                len(factor.held_out),
                f"{factor.value:.3f}",
                _range([factor.lowest, factor.highest], ".2f"),
                *_errors_cells(fitted),
                *_errors_cells(held_out),
                f"{factor.in_band} of {len(held_out)}",
                *_errors_cells(left_out),
                *_errors_cells(list(factor.products_left_out_errors().values())),
            )
        )

    lines = ["## From a bound to an expected time", "", _TITLE, "", table.markdown(rows)]
    lines += [f"- {_remarks(factor)}" for factor in by_machine.values()]
    return "\n".join(lines)


def _errors_cells(errors: Sequence[float]) -> tuple[str, str]:
    """Returns the median error without sign, and the largest with its sign; `-` for none."""
    if not errors:
        return "-", "-"
    return f"{statistics.median(map(abs, errors)):.0%}", f"{max(errors, key=abs):+.0%}"


def _remarks(factor: Factor) -> str:
    """Returns a machine's sources, what was held out and missed the aim, and what no bound was."""
    sources = []
    for project in factor.projects:
        records = [*factor.fitted, *factor.held_out]
        sources.append(f"{sum(record.project == project for record in records)} of {project}")
    parts = [f"{factor.machine}: {', '.join(sources)}"]

    # What was predicted worst first.
    errors = {record.id: factor.error(record) for record in factor.held_out}
    beyond = []
    for name, error in sorted(errors.items(), key=lambda item: -abs(item[1])):
        if abs(error) > _AIM:
            beyond.append(f"{name} {error:+.1%}")
    if errors:
        within = len(errors) - len(beyond)
        parts.append(f"{within} of {len(errors)} held out are within {_AIM:.0%}")
    if beyond:
        parts.append(f"beyond: {', '.join(beyond)}")

    faster = [record.id for record in (*factor.fitted, *factor.held_out) if record.share > 1]
    if faster:
        parts.append(f"faster than their bounds: {', '.join(faster)}")
    return "; ".join(parts)


def _range(values: Sequence[float], spec: str) -> str:
    """Returns the least and the greatest value in one of Python's formats, or the only one."""
    ends = [format(end, spec) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))
