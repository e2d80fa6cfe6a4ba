"""From a bound to an expected time: rates for each machine, of steps that others measured.

A plan's time is a bound, with every instruction at the machine's peak rate. Real steps take longer.
bounds.json lists published step times beside our plans of the same steps. A bound has three parts:
attention's kernels, matrix products, and all else, which is traffic of the memory and the network.
On one machine, each part reaches about the same share of its peak rate in all steps:

    expected = attention / attention_rate + products / products_rate + others / others_rate

The rates make the squares of log(expected / measured) smallest, so a step predicted twice as long
counts as much as one predicted half as long. A few steps cannot tell three rates apart if their
parts are alike. So unequal rates have a price, as in ridge regression:

    sum over steps of log(expected / measured)^2
      + STIFFNESS * (log(attention_rate / products_rate)^2 + log(others_rate / products_rate)^2)

With the price, a part that no step has, such as attention's kernels, gets the products' rate. The
rates of a single step are all equal to bound / measured.

Half of the records are fitted. The other half are held out, to measure the errors. For each machine
and source we sort the records by name and fit every second one, from the first. Neighbours in this
order are sizes of one model, or numbers of devices, so both halves contain all kinds. The names do
not depend on the times, so the choice is not biased.

The band extends from the record that is fastest beside its expected time to the slowest one. If a
planned program deviates like n fitted ones, it is within their band with a probability of
(n - 1) / (n + 1), whatever the distribution. One record gives no band.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xla_spmd.files import json_records

BOUNDS = pathlib.Path(__file__).with_name("bounds.json")

# The price of unequal rates: a ratio of e costs as much as an error of 17 % in one step.
# Predictions of a fitted step by all others are best with 0.01 to 0.1, on GPUs and TPUs alike.
STIFFNESS = 0.03


@dataclasses.dataclass(frozen=True)
class Shares:
    """The shares of a step's bound that its three kinds of work take."""

    attention: float  # Attention's kernels; 0 if products compute attention.
    products: float  # All other products.

    @property
    def others(self) -> float:
        """The share of the rest: traffic of the memory and the network."""
        return 1 - self.attention - self.products


@dataclasses.dataclass(frozen=True)
class Bound:
    """A published training step whose plan is a bound of it: an entry of bounds.json."""

    id: str
    machine: str  # Such as `v3`, the beginning of the topology.
    topology: str
    model: str
    devices: int
    row_tokens: int  # The length of a row.
    bound_secs: float
    attention_secs: float  # The time of attention kernels; 0 if products compute attention.
    products_secs: float  # The time of all products, attention's included, at the peak rate.
    measured_secs: float
    source: str  # The project's name, then the place in it.

    @property
    def share(self) -> float:
        """Bound / measured. A value above 1 shows that the bound does not hold."""
        return self.bound_secs / self.measured_secs

    @property
    def shares(self) -> Shares:
        """The shares of the three kinds of work in the bound."""
        return shares_of(self.bound_secs, self.attention_secs, self.products_secs)

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
class Rates:
    """The shares of the peak rates that the three kinds of work reach on a machine."""

    attention: float
    products: float
    others: float

    def share(self, shares: Shares) -> float:
        """Returns the share of its bound that a step reaches."""
        over = shares.attention / self.attention
        over += shares.products / self.products
        over += shares.others / self.others
        return 1 / over


@dataclasses.dataclass(frozen=True)
class Factor:
    """The shares of their bounds that published steps on a machine reach, for a planned step."""

    machine: str
    fitted: tuple[Bound, ...]  # One or more, sorted by their names.
    held_out: tuple[Bound, ...]
    # The planned step's; None if no step is known, which is then like the fitted steps on average.
    shares: Shares | None = None

    @functools.cached_property
    def rates(self) -> Rates:
        """The rates of the fitted steps."""
        return fit_rates(self.fitted)

    @property
    def value(self) -> float:
        """The share of its bound that the step is expected to reach."""
        return self.rates.share(self.shares or self.usual_shares)

    @property
    def usual_shares(self) -> Shares:
        """The mean shares of the fitted steps."""
        shares = [record.shares for record in self.fitted]
        return Shares(
            attention=statistics.mean(own.attention for own in shares),
            products=statistics.mean(own.products for own in shares),
        )

    @property
    def lowest(self) -> float:
        """The share that it reaches if it is as slow as the slowest fitted step."""
        return min(map(self._as_fast_as, self.fitted))

    @property
    def highest(self) -> float:
        """The share that it reaches if it is as fast as the fastest fitted step."""
        return max(map(self._as_fast_as, self.fitted))

    def _as_fast_as(self, record: Bound) -> float:
        """Returns the step's share if its rates deviate from the fitted ones like the record's."""
        return record.share * (self.value / self.rates.share(record.shares))

    def of_record(self, record: Bound) -> "Factor":
        """Returns the factor of the same fitted records for this record's step."""
        return dataclasses.replace(self, shares=record.shares)

    @property
    def projects(self) -> tuple[str, ...]:
        """Who published the fitted records."""
        return tuple(sorted({record.project for record in self.fitted}))

    def expected(self, bound_secs: float) -> Expected:
        """Returns the expected time and the band of a step with the bound `bound_secs`."""
        return Expected(
            secs=bound_secs / self.value,
            least_secs=bound_secs / self.highest,
            most_secs=bound_secs / self.lowest,
        )

    def outside(
        self, bound_secs: float, devices: int, row_tokens: int | None = None
    ) -> tuple[str, ...]:
        """Returns the ways in which a step is smaller or larger than all fitted steps.

        Args:
          bound_secs: the step's bound.
          devices: the number of its devices.
          row_tokens: the length of its rows; None if it is not known.
        """
        secs = self.expected(bound_secs).secs
        ways = []
        if not _is_within(secs, [record.measured_secs for record in self.fitted]):
            ways.append(f"a step of {secs:.3g} s")
        if not _is_within(devices, [record.devices for record in self.fitted]):
            ways.append(f"{devices} devices" if devices > 1 else "1 device")
        lengths = [record.row_tokens for record in self.fitted]
        if row_tokens is not None and not _is_within(row_tokens, lengths):
            ways.append(f"rows of {row_tokens} tokens")
        return (*ways, *self._outside_shares())

    def _outside_shares(self) -> Iterator[str]:
        """Yields the kinds of work of which the step has a smaller or larger share than all."""
        if self.shares is None:
            return
        names = {"attention": "attention's kernels", "others": "memory and network"}
        for kind, name in names.items():
            share = getattr(self.shares, kind)
            fitted = [getattr(record.shares, kind) for record in self.fitted]
            if not min(fitted) - _SAME_SHARE <= share <= max(fitted) + _SAME_SHARE:
                yield f"{share:.0%} of the bound in {name}"

    def as_json(self, bound_secs: float) -> dict[str, Any]:
        """Returns the expected time of a step, its band, and the records that they rest on."""
        expected = self.expected(bound_secs)
        return {
            "step_secs": expected.secs,
            "least_step_secs": expected.least_secs,
            "most_step_secs": expected.most_secs,
            "factor": self.value,
            "rates": dataclasses.asdict(self.rates),
            "machine": self.machine,
            "fitted_records": [record.id for record in self.fitted],
            "held_out_records": [record.id for record in self.held_out],
            "projects": list(self.projects),
        }

    def error(self, record: Bound) -> float:
        """Returns the relative error of a record's expected time: 0.1 if it is 10 % too long."""
        expected = self.of_record(record).expected(record.bound_secs)
        return expected.secs / record.measured_secs - 1


# Shares that differ by less are alike.
_SAME_SHARE = 0.05

# Gauss and Newton's method ends after this change of the logarithms, or these steps.
_SMALLEST_CHANGE = 1e-9
_MOST_STEPS = 100


def _is_within(value: float, fitted: Sequence[float]) -> bool:
    return min(fitted) <= value <= max(fitted)


def of_topology(name: str, shares: Shares | None = None) -> Factor | None:
    """Returns the factor of a step on a topology such as `v3:8x8`; None without published steps.

    Raises ValueError if the file of the published steps is missing or damaged.
    """
    factor = by_machine(read(BOUNDS)).get(name.partition(":")[0])
    if factor is None:
        return None
    return dataclasses.replace(factor, shares=shares)


def shares_of(bound_secs: float, attention_secs: float, products_secs: float) -> Shares:
    """Returns the shares of a bound.

    Args:
      bound_secs: the time of a call at the roofline.
      attention_secs: the part in attention's kernels.
      products_secs: the time of all products, attention's included, at the peak rate.
    """
    # Kernels may be limited by their memory traffic, and then take longer than their products.
    products = max(0.0, products_secs - attention_secs)
    return Shares(attention_secs / bound_secs, products / bound_secs)


def by_machine(records: Sequence[Bound]) -> dict[str, Factor]:
    """Returns the factor of each machine that has a record, sorted by its name."""
    factors = {}
    for machine in sorted({record.machine for record in records}):
        on_machine = [record for record in records if record.machine == machine]
        factors[machine] = _fit(machine, sorted(on_machine, key=lambda record: record.id))
    return factors


def _fit(machine: str, records: Sequence[Bound]) -> Factor:
    """Returns the factor of a machine's records, sorted by name."""
    # The records of one project are halved together.
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


def fit_rates(records: Sequence[Bound]) -> Rates:
    """Returns the rates that fit one or more records best, by the formula of this module."""
    shares = [record.shares for record in records]
    parts = np.array([[own.products, own.attention, own.others] for own in shares])
    log_shares = np.log([record.share for record in records])

    # The unknowns are the logarithms of 1 / products_rate, and of the ratios of the products' rate
    # to the other two. Gauss and Newton's method begins with equal rates.
    unknowns = np.array([-log_shares.mean(), 0.0, 0.0])
    price = STIFFNESS * np.array([0.0, 1.0, 1.0])
    for _ in range(_MOST_STEPS):
        slower = np.exp(unknowns * [0.0, 1.0, 1.0] + unknowns[0])
        over = parts @ slower
        errors = np.log(over) + log_shares
        slopes = parts * slower / over[:, None]
        slopes[:, 0] = 1.0
        gradient = slopes.T @ errors + price * unknowns
        change = np.linalg.solve(slopes.T @ slopes + np.diag(price), gradient)
        unknowns -= np.clip(change, -1.0, 1.0)
        if np.abs(change).max() < _SMALLEST_CHANGE:
            break

    products, attention, others = np.exp(-(unknowns * [0.0, 1.0, 1.0] + unknowns[0]))
    return Rates(float(attention), float(products), float(others))


def _check(records: Sequence[Bound]) -> None:
    """Raises ValueError if a time is not a number above 0, or if a name is wrong or not unique."""
    names = set()
    for record in records:
        for field in ("bound_secs", "measured_secs"):
            secs = getattr(record, field)
            if not isinstance(secs, int | float) or not 0 < secs < math.inf:
                raise ValueError(f"{record.id}: {field} must be above 0, got {secs!r}")
        if record.topology.partition(":")[0] != record.machine:
            raise ValueError(
                f"{record.id}: {record.topology} is not a topology of {record.machine}"
            )
        if record.id in names:
            raise ValueError(f"{record.id} is listed twice")
        names.add(record.id)
