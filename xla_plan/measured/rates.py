"""Rates that were measured on one device of a kind, in a file, and the time that they give a plan.

A plan keeps its work by size (xla_plan/cost/work.py). An instruction takes a fixed time to start,
and then the longest of the times of its flops, of its bytes and of its exponentials and the like,
at the rates measured for its form and its size.
Collectives keep the time that the plan gives them: one device cannot measure a network.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence

from xla_plan.cost.step_cost import StepCost
from xla_plan.cost.work import Work, WorkSum
from xla_plan.cost.work import size_of as work_size
from xla_plan.machines import hardware
from xla_spmd.files import atomic_file, digests, json_records
from xla_spmd.hlo.forms import FORMS, TRANSPOSING


@dataclasses.dataclass(frozen=True)
class Rate:
    """The flops or bytes of a second in work of one size."""

    size: int  # The logarithm to base 2 of the flops of a product, or of the bytes of a run.
    per_sec: float


@dataclasses.dataclass(frozen=True)
class MeasuredRates:
    """The rates of one device. Raises ValueError if one is missing or not above 0."""

    device: str  # JAX's device_kind.
    versions: dict[str, str]  # The packages that compiled the measured programs.
    products: dict[str, tuple[Rate, ...]]  # By product_name, such as `bf16 nt`; by growing size.
    memory: tuple[Rate, ...]  # By growing size, as the next one.
    transposes: tuple[Rate, ...]  # Of copies with another order of dims, and what is fused in.
    transcendentals_per_sec: float  # The elements of exponentials and the like.
    start_secs: float  # The time to start an instruction.
    # The flops of a second of attention's kernel; None if it was not measured.
    attention_per_sec: float | None = None

    def __post_init__(self) -> None:
        by_size = [self.memory, self.transposes, *self.products.values()]
        if not self.products or not all(by_size):
            raise ValueError("expected rates of products, of the memory and of transposes.")
        rates = [rate.per_sec for of_kind in by_size for rate in of_kind]
        rates.append(self.transcendentals_per_sec)
        if self.attention_per_sec is not None:
            rates.append(self.attention_per_sec)
        if min(rates) <= 0 or self.start_secs < 0:
            raise ValueError(f"expected rates above 0, got {min(rates)!r}.")


@dataclasses.dataclass(frozen=True)
class Predicted:
    """The seconds of a call by measured rates."""

    attention: float
    products: float
    others: float
    starts: float  # The time to start all instructions.
    network: float  # The plan's own, without the part that runs beside computation.

    @property
    def secs(self) -> float:
        """The sum of all parts."""
        return self.attention + self.products + self.others + self.starts + self.network


def predict(work: Sequence[WorkSum], rates: MeasuredRates, network_secs: float = 0.0) -> Predicted:
    """Returns the time of a call's work by measured rates, with collectives of `network_secs`."""
    secs = dict.fromkeys(Work, 0.0)
    for part in work:
        secs[Work(part.kind)] += _secs(part, rates)
    return Predicted(
        attention=secs[Work.ATTENTION],
        products=secs[Work.PRODUCTS],
        others=secs[Work.OTHERS],
        starts=rates.start_secs * sum(part.runs for part in work),
        network=network_secs,
    )


def _secs(work: WorkSum, rates: MeasuredRates) -> float:
    """Returns the seconds of instructions of one kind and size, without their starts."""
    # Every instruction of the class has about the mean's bytes.
    bytes_size = work_size(work.accessed_bytes / work.runs)
    traffic = rates.transposes if work.form == TRANSPOSING else rates.memory
    secs = [
        work.accessed_bytes / per_sec(traffic, bytes_size),
        work.transcendentals / rates.transcendentals_per_sec,
    ]
    if work.flops:
        secs.append(work.flops / _flops_per_sec(work, rates))
    return max(secs)


def _flops_per_sec(work: WorkSum, rates: MeasuredRates) -> float:
    if work.kind == Work.ATTENTION and rates.attention_per_sec is not None:
        return rates.attention_per_sec
    return per_sec(_of_product(work, rates), work.size)


def _of_product(work: WorkSum, rates: MeasuredRates) -> Sequence[Rate]:
    """Returns the rates of a product, or of the most similar one that was measured."""
    # `f32 highest` was not measured apart from `f32`; others are multiplied like bfloat16.
    for arithmetic in (work.arithmetic, work.arithmetic.split()[0], "bf16"):
        for form in (work.form, *FORMS, ""):
            name = product_name(arithmetic, form)
            if name in rates.products:
                return rates.products[name]
    return next(iter(rates.products.values()))


def product_name(arithmetic: str, form: str) -> str:
    """Returns the name of a product's rates, such as `bf16 nt`, or `bf16` without a form."""
    return f"{arithmetic} {form}".strip()


def per_sec(by_size: Sequence[Rate], size: float) -> float:
    """Returns the rate at a size, linear between the measured ones and constant beyond them."""
    if size <= by_size[0].size:
        return by_size[0].per_sec
    for below, above in itertools.pairwise(by_size):
        if size <= above.size:
            part = (size - below.size) / (above.size - below.size)
            return below.per_sec + part * (above.per_sec - below.per_sec)
    return by_size[-1].per_sec


def save(rates: MeasuredRates, path: pathlib.Path) -> None:
    """Writes rates as JSON."""
    values = digests.with_digest(dataclasses.asdict(rates))
    atomic_file.write(path, f"{json.dumps(values, indent=2)}\n")


def load(path: pathlib.Path, topology: str | None = None) -> MeasuredRates:
    """Returns the rates in a file.

    Raises ValueError, which names the file, if it is missing or damaged, or if another kind of
    device than the topology's was measured.
    """
    what = f"--rates={path}"
    if not path.is_file():
        raise ValueError(f"{what}: no such file; `xla_plan calibrate --out={path}` makes one.")
    try:
        values = json_records.parse(path.read_bytes())
        is_whole = digests.pop_digest(values)
        rates: MeasuredRates = json_records.read(MeasuredRates, values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{what} is damaged or outdated ({error!r}); measure again.") from error
    if not is_whole:
        raise ValueError(f"{what} is damaged: its digest does not match its contents.")

    if topology is not None:
        machine = topology.partition(":")[0]
        measured = hardware.generation_of_kind(rates.device)
        if measured != machine:
            raise ValueError(
                f"{what}: these are rates of {rates.device}, expected rates of {machine}."
            )
    return rates


def described(cost: StepCost, rates: MeasuredRates, call: str = "call") -> str:
    """Returns the time of a planned call by measured rates in a line."""
    network_secs = max(0.0, cost.roofline_secs.network - cost.overlapped_secs)
    predicted = predict(cost.work, rates, network_secs)
    parts = {
        "products": predicted.products,
        "attention's kernels": predicted.attention,
        "all else": predicted.others,
        "starts": predicted.starts,
        "network": predicted.network,
    }
    shown = ", ".join(f"{name} {secs:.3g}" for name, secs in parts.items() if secs)
    return f"by rates measured on {rates.device}: {predicted.secs:.3g} s a {call} ({shown})"
