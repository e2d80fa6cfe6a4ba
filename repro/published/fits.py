"""How well the rates of all machines predict published steps, as tables."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from xla_plan.expected import factors, factors_text
from xla_plan.expected.factors import Bound, Factor, Rates
from xla_spmd.files import table

# The aim for the relative error of a prediction.
_AIM = 0.25

# The most tokens of a row in each class of lengths.
_LENGTHS = (1024, 4096, 8192, 16384, 65536)

_TITLE = """\
Rates are the shares of their peaks that attention's kernels, products and all else reach, fitted to
half of the steps; in parentheses, the least and the most if one fitted step is left out. Errors are
expected over measured times: the median without sign, and the largest."""

_FITS = """\
The band goes from the fastest to the slowest fitted step, beside their expected times."""

_LEFT_OUT = """\
Each step is predicted by all other steps of its machine, by all steps of other projects, and by all
steps with rows of another length. The last columns fit the time of products alone in place of the
bound's three parts."""

_BY_LENGTH = "Errors of the fitted and of the held-out steps by the tokens of a row."


def in_band(factor: Factor) -> int:
    """Returns the number of held-out records within the band."""
    count = 0
    for record in factor.held_out:
        own = factor.of_record(record)
        count += own.lowest <= record.share <= own.highest
    return count


def left_out_errors(
    factor: Factor, group: Callable[[Bound], object] = lambda record: record.id
) -> dict[str, float]:
    """Returns each record's error, by name, if all records of other groups are fitted.

    By default each record is a group. The result is empty if all records are of one group.
    """
    records = (*factor.fitted, *factor.held_out)
    errors = {}
    for left_out in records:
        others = tuple(record for record in records if group(record) != group(left_out))
        if others:
            errors[left_out.id] = dataclasses.replace(factor, fitted=others).error(left_out)
    return errors


def products_left_out_errors(factor: Factor) -> dict[str, float]:
    """Returns each record's error if the times of products alone are fitted to all others."""
    records = (*factor.fitted, *factor.held_out)
    shares = {record.id: record.products_secs / record.measured_secs for record in records}
    errors = {}
    for left_out, share in shares.items():
        others = [other for name, other in shares.items() if name != left_out]
        if others:
            errors[left_out] = share / statistics.geometric_mean(others) - 1
    return errors


def text(by_machine: Mapping[str, Factor]) -> str:
    """Returns all machines' fits as Markdown tables, with the misses of the aim."""
    tables = {
        _TITLE: _rates(by_machine),
        _FITS: _fits(by_machine),
        _BY_LENGTH: _by_length(by_machine),
        _LEFT_OUT: _left_out(by_machine),
    }
    parts = ["## From a bound to an expected time"]
    for title, rows in tables.items():
        parts += [title, rows.rstrip()]
    parts.append("\n".join(f"- {_remarks(factor)}" for factor in by_machine.values()))
    return "\n\n".join(parts)


def _rates(by_machine: Mapping[str, Factor]) -> str:
    """Returns the table of the machines' rates, with their range."""
    rows: list[Sequence[object]] = [("machine", "attention's kernels", "products", "all else")]
    for machine, factor in by_machine.items():
        ranges = _range(factor)
        cells = []
        for kind in ("attention", "products", "others"):
            rate = f"{getattr(factor.rates, kind):.2f}"
            ends = [getattr(rates, kind) for rates in ranges]
            cells.append(f"{rate} ({factors_text.span(ends, '.2f')})" if ends else rate)
        if not any(record.attention_secs for record in factor.fitted):
            cells[0] = "-"
        rows.append((machine, *cells))
    return table.markdown(rows)


def _range(factor: Factor) -> list[Rates]:
    """Returns the rates without each fitted record in turn; empty for a single record."""
    found = []
    for left_out in factor.fitted:
        others = [record for record in factor.fitted if record is not left_out]
        if others:
            found.append(factors.fit_rates(others))
    return found


def _fits(by_machine: Mapping[str, Factor]) -> str:
    """Returns the table of the errors of the fitted and the held-out steps."""
    rows: list[Sequence[object]] = [
        (
            "machine",
            "fitted",
            "held out",
            "band",
            "fitted: median",
            "largest",
            "held out: median",
            "largest",
            "in the band",
        )
    ]
    for machine, factor in by_machine.items():
        fitted = []
        if len(factor.fitted) > 1:  # With one record, none is left to fit.
            fitted = [factor.error(record) for record in factor.fitted]
        held_out = [factor.error(record) for record in factor.held_out]
        rows.append(
            (
                machine,
                len(factor.fitted),
                len(factor.held_out),
                _band_cell(factor),
                *_errors_cells(fitted),
                *_errors_cells(held_out),
                f"{in_band(factor)} of {len(held_out)}",
            )
        )
    return table.markdown(rows)


def _band_cell(factor: Factor) -> str:
    """Returns the band around an expected time of 1."""
    if len(factor.fitted) == 1:
        return "-"
    return factors_text.span([factor.value / factor.highest, factor.value / factor.lowest], ".2f")


def _by_length(by_machine: Mapping[str, Factor]) -> str:
    """Returns the table of errors by machine and by the rows' length."""
    rows: list[Sequence[object]] = [
        ("machine", "rows", "fitted", "median", "largest", "held out", "median", "largest")
    ]
    for machine, factor in by_machine.items():
        shortest = 1
        for longest in _LENGTHS:
            fitted = _errors_between(factor, factor.fitted, shortest, longest)
            held_out = _errors_between(factor, factor.held_out, shortest, longest)
            if fitted or held_out:
                cells = (len(fitted), *_errors_cells(fitted), len(held_out))
                rows.append((machine, f"to {longest}", *cells, *_errors_cells(held_out)))
            shortest = longest + 1
    return table.markdown(rows)


def _errors_between(
    factor: Factor, records: Sequence[Bound], shortest: int, longest: int
) -> list[float]:
    """Returns the errors of the records whose rows have a length between two, inclusive."""
    own = [record for record in records if shortest <= record.row_tokens <= longest]
    return [factor.error(record) for record in own]


def _left_out(by_machine: Mapping[str, Factor]) -> str:
    """Returns the table of errors of steps that are predicted by others."""
    rows: list[Sequence[object]] = [
        (
            "machine",
            "one left out: median",
            "largest",
            "its project: median",
            "largest",
            "its length: median",
            "largest",
            "by products alone: median",
            "largest",
        )
    ]
    for machine, factor in by_machine.items():
        of_project = left_out_errors(factor, lambda record: record.project)
        of_length = left_out_errors(factor, lambda record: record.row_tokens)
        cells: list[str] = []
        for errors in (
            left_out_errors(factor),
            of_project,
            of_length,
            products_left_out_errors(factor),
        ):
            cells += _errors_cells(list(errors.values()))
        rows.append((machine, *cells))
    return table.markdown(rows)


def _errors_cells(errors: Sequence[float]) -> tuple[str, str]:
    """Returns the median error without sign, and the largest with its sign; `-` if empty."""
    if not errors:
        return "-", "-"
    return f"{statistics.median(map(abs, errors)):.0%}", f"{max(errors, key=abs):+.0%}"


def _remarks(factor: Factor) -> str:
    """Returns a machine's sources, the held-out records that were badly predicted, and the records
    that beat their bound.
    """
    sources = []
    for project in factor.projects:
        records = [*factor.fitted, *factor.held_out]
        sources.append(f"{sum(record.project == project for record in records)} of {project}")
    parts = [f"{factor.machine}: {', '.join(sources)}"]

    # The worst prediction comes first.
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
