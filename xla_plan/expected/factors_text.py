"""Expected times as text, and the published steps that they rest on."""

from collections.abc import Iterator, Sequence

from xla_plan.expected import factors
from xla_plan.expected.factors import Factor, Shares


def basis(topology: str, shares: Shares | None = None) -> str:
    """Returns in one line the published steps that expected times on a topology rest on, if any.

    `shares` are the parts of the planned step's bound, if it has one. Raises ValueError if the file
    of the published steps is missing or damaged.
    """
    machine = topology.partition(":")[0]
    factor = factors.of_topology(topology, shares)
    if factor is None:
        return f"expected on {machine}: unknown, as no steps on it are published"

    steps = "1 published training step"
    if len(factor.fitted) > 1:
        steps = f"{len(factor.fitted)} published training steps"

    # Steps of different sizes may reach smaller shares of their bounds.
    secs = [record.measured_secs for record in factor.fitted]
    devices = [record.devices for record in factor.fitted]
    lengths = [record.row_tokens for record in factor.fitted]
    reached = [record.share for record in factor.fitted]
    line = (
        f"expected on {machine}: the bound over {factor.value:.2f}{_rates(factor)}, as {steps} of "
        f"{', '.join(factor.projects)} ({span(secs, '.3g')} s, {span(devices, 'd')} devices, "
        f"rows of {span(lengths, 'd')} tokens) "
        f"reached {span(reached, '.2f')} of it"
    )

    # The error of the factor on the held-out records.
    if factor.held_out:
        errors = [factor.error(record) for record in factor.held_out]
        line += f"; {len(errors)} held out: {span(errors, '+.0%')} off"

    # Work that ran side by side, and counts one after the other.
    faster = [record.id for record in (*factor.fitted, *factor.held_out) if record.share > 1]
    if faster:
        line += f"; the bound is not a least time: faster was {', '.join(faster)}"
    return line


def extrapolation(
    topology: str,
    bound_secs: float,
    devices: int,
    row_tokens: int | None = None,
    shares: Shares | None = None,
) -> Iterator[str]:
    """Yields a line if a step is unlike all of the fitted steps; see Factor.outside."""
    factor = factors.of_topology(topology, shares)
    ways = () if factor is None else factor.outside(bound_secs, devices, row_tokens)
    if ways:
        yield f"the expected time extrapolates: nothing like {', '.join(ways)} was fitted"


def _rates(factor: Factor) -> str:
    """Returns the rates in parentheses, if they differ, such as ` (products over 0.7, ...)`."""
    attention = f"{factor.rates.attention:.2f}"
    products = f"{factor.rates.products:.2f}"
    others = f"{factor.rates.others:.2f}"
    parts = []
    if attention != products:
        parts.append(f"attention's kernels over {attention}")
    if parts or others != products:
        parts += [f"products over {products}", f"all else over {others}"]
    return f" ({', '.join(parts)})" if parts else ""


def expected_secs(factor: Factor, bound_secs: float, call: str = "step") -> str:
    """Returns expected seconds and their band, such as `0.58 s a step (0.5 to 0.65)`."""
    expected = factor.expected(bound_secs)
    band = f"{expected.least_secs:.3g} to {expected.most_secs:.3g}"
    if len(factor.fitted) == 1:
        band = "no band"
    return f"{expected.secs:.3g} s a {call} ({band})"


def span(values: Sequence[float], spec: str) -> str:
    """Returns the least and the greatest value in one of Python's formats, or the only one."""
    ends = [format(end, spec) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))
