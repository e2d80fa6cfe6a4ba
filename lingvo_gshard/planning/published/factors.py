"""From a bound to an expected time: one factor for each machine, of steps that others measured.

A plan's time is a bound, with every instruction at the machine's peak rate. Real steps take longer,
and bounds.json has those that somebody published beside our plans of them. On one machine they are
alike, so one number serves:

    share = bound / measured                        of a record
    factor = (share_1 * ... * share_n) ^ (1 / n)    of a machine's fitted records
    expected = bound / factor

The geometric mean makes the squares of log(expected / measured) smallest: a step predicted twice as
long counts as much as one predicted half as long. More factors, such as one of products and one of
the rest, predict a record that is left out hardly better.

Half of the records are fitted, and the other half are held out to tell how good the factor is.
Those of a source on a machine are sorted by their names, and every other one is fitted, from the
first. Neighbours in that order are sizes of one model, or numbers of devices, so that both halves
have all kinds; and names know nothing of the times, so that nobody has chosen what is held out.

The band is from the lowest to the highest share of the fitted records. If a plan's program is to
them as they are to each other, its share lies in the band of n of them with a probability of
(n - 1) / (n + 1), whatever the distribution; of one record there is no band.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.files import json_records

BOUNDS = pathlib.Path(__file__).with_name("bounds.json")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A published training step whose plan is a bound of it: an entry of bounds.json."""

    id: str
    machine: str  # Such as `v3`, the beginning of the topology.
    topology: str
    model: str
    devices: int
    bound_secs: float
    products_secs: float  # The part of matrix products, at the peak rate.
    measured_secs: float
    source: str  # Its first word is the project's name, and the rest the place there.

    @property
    def share(self) -> float:
        """The bound over what was measured; above 1 if the bound was none."""
        return self.bound_secs / self.measured_secs

    @property
    def products_share(self) -> float:
        """The time of products at the peak rate over what was measured."""
        return self.products_secs / self.measured_secs

    @property
    def project(self) -> str:
        """Who published it, such as `tensorflow/lingvo`."""
        return self.source.split()[0].rstrip(",")


@dataclasses.dataclass(frozen=True)
class Expected:
    """Seconds that a step may take: the expected ones, and the least and the most of the band."""

    secs: float
    least_secs: float
    most_secs: float


@dataclasses.dataclass(frozen=True)
class Factor:
    """What published steps on a machine tell of those that are only planned."""

    machine: str
    fitted: tuple[Bound, ...]  # One or more, sorted by their names.
    held_out: tuple[Bound, ...]

    @property
    def value(self) -> float:
        """The geometric mean of the fitted shares."""
        return statistics.geometric_mean(record.share for record in self.fitted)

    @property
    def lowest(self) -> float:
        """The lowest fitted share, that of the slowest step."""
        return min(record.share for record in self.fitted)

    @property
    def highest(self) -> float:
        """The highest fitted share, that of the fastest step."""
        return max(record.share for record in self.fitted)

    @property
    def projects(self) -> tuple[str, ...]:
        """Who published the fitted records."""
        return tuple(sorted({record.project for record in self.fitted}))

    @property
    def in_band(self) -> int:
        """How many of the records that are held out lie in the band."""
        return sum(self.lowest <= record.share <= self.highest for record in self.held_out)

    def expected(self, bound_secs: float) -> Expected:
        """Returns how long a step takes whose bound is `bound_secs`."""
        return Expected(
            secs=bound_secs / self.value,
            least_secs=bound_secs / self.highest,
            most_secs=bound_secs / self.lowest,
        )

    def as_json(self, bound_secs: float) -> dict[str, Any]:
        """Returns the expected time of a step, its band, and what they rest on."""
        expected = self.expected(bound_secs)
        return {
            "step_secs": expected.secs,
            "least_step_secs": expected.least_secs,
            "most_step_secs": expected.most_secs,
            "factor": self.value,
            "machine": self.machine,
            "fitted_records": [record.id for record in self.fitted],
            "held_out_records": [record.id for record in self.held_out],
            "projects": list(self.projects),
        }

    def error(self, record: Bound) -> float:
        """Returns the relative error of a record's expected time: 0.1 if it is 10 % too long."""
        return self.expected(record.bound_secs).secs / record.measured_secs - 1

    def left_out_errors(self) -> dict[str, float]:
        """Returns the error of each record by its name, if all others are fitted.

        Empty for a single record.
        """
        records = (*self.fitted, *self.held_out)
        return _left_out_errors({record.id: record.share for record in records})

    def products_left_out_errors(self) -> dict[str, float]:
        """Returns the same, if times of products alone were fitted, and not bounds."""
        records = (*self.fitted, *self.held_out)
        return _left_out_errors({record.id: record.products_share for record in records})


def of_topology(name: str) -> Factor | None:
    """Returns the factor of a topology such as `v3:8x8`; None if no step on such is published.

    Raises ValueError as `read`.
    """
    return by_machine(read(BOUNDS)).get(name.partition(":")[0])


def by_machine(records: Sequence[Bound]) -> dict[str, Factor]:
    """Returns the factor of each machine that has a record, sorted by its name."""
    factors = {}
    for machine in sorted({record.machine for record in records}):
        on_machine = [record for record in records if record.machine == machine]
        factors[machine] = _fit(machine, sorted(on_machine, key=lambda record: record.id))
    return factors


def _fit(machine: str, records: Sequence[Bound]) -> Factor:
    """Returns the factor of a machine's records, sorted by name."""
    # Those of one project are halved together.
    by_project: dict[str, list[Bound]] = {}
    for record in records:
        by_project.setdefault(record.project, []).append(record)

    fitted: list[Bound] = []
    held_out: list[Bound] = []
    for _, of_project in sorted(by_project.items()):
        fitted += of_project[::2]
        held_out += of_project[1::2]
    return Factor(machine, tuple(fitted), tuple(held_out))


@functools.cache
def read(path: pathlib.Path) -> tuple[Bound, ...]:
    """Returns the records of a file such as bounds.json.

    Raises ValueError, which names the file, if it is missing or damaged.
    """
    try:
        values = json_records.parse(path.read_text(encoding="utf-8"))
        if not isinstance(values, list):
            raise ValueError(f"expected a list of records, got {type(values).__name__}")
        records = tuple(json_records.read(Bound, value) for value in values)
        _check(records)
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error!r}); install it again.") from error
    return records


def _check(records: Sequence[Bound]) -> None:
    """Raises ValueError if a time is no number above 0, or a name is wrong or there twice."""
    names = set()
    for record in records:
        for field in ("bound_secs", "measured_secs"):
            secs = getattr(record, field)
            if not isinstance(secs, int | float) or not 0 < secs < math.inf:
                raise ValueError(f"{record.id}: {field} must be above 0, got {secs!r}")
        if record.topology.partition(":")[0] != record.machine:
            raise ValueError(f"{record.id}: {record.topology} is no topology of {record.machine}")
        if record.id in names:
            raise ValueError(f"{record.id} is there twice")
        names.add(record.id)


def _left_out_errors(shares: Mapping[str, float]) -> dict[str, float]:
    """Returns the error of each share's time, if all others are fitted; empty for one alone."""
    errors = {}
    for left_out, share in shares.items():
        others = [other for name, other in shares.items() if name != left_out]
        if others:
            errors[left_out] = share / statistics.geometric_mean(others) - 1
    return errors
