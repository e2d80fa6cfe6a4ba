"""A plan: what a training step of an experiment needs and costs on a topology; plan.json."""

from __future__ import annotations

import dataclasses
import json
import operator
import pathlib

from lingvo_gshard.core import atomic_file, json_records
from lingvo_gshard.planning.memory import Buffer, Memory

PLAN_JSON = "plan.json"
# The share of the roofline that the paper measured for MoE(2048E, 36L) (section 5.2).
PAPERS_SHARE = 0.48
_SECS_PER_YEAR = 365.25 * 24 * 3600
_TRAINING_TOKENS = 1e12


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step, or of a part of it, at the roofline.

    `compute` is flops over the peak rate, `memory` bytes over the memory's bandwidth, `network` the
    time of collectives on the torus, and `step` the sum over instructions of the longer of compute
    and memory time, plus network.
    """

    compute: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    step: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclasses.dataclass(frozen=True)
class CollectiveSum:
    """All collectives of one kind from one layer in a step, loops included.

    `kind` is named as in the compiled program; `bytes` are those of the results on one core.
    """

    kind: str
    count: int
    bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a step computes and sends, and how long it takes.

    Attributes:
      collectives: one entry for each kind and source, the most bytes first.
      flops_per_core: the flops of matrix products in a step, by category.
      model_flops_per_core: the flops that the mathematics asks for (model/flops.py).
      roofline_secs: our roofline of the whole step.
      network_secs_by_kind: the time of the collectives of each kind.
      xla_optimal_secs: XLA's optimal_seconds, with loop bodies times their trip counts.
      xla_optimal_secs_once: XLA's optimal_seconds as XLA gives them, each loop body once.
      instructions: the number of instructions in all computations.
    """

    collectives: tuple[CollectiveSum, ...]
    flops_per_core: dict[str, float]
    model_flops_per_core: float
    roofline_secs: Times
    roofline_secs_by_category: dict[str, Times]
    network_secs_by_kind: dict[str, float]
    xla_optimal_secs: float
    xla_optimal_secs_once: float
    instructions: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """One experiment on one topology.

    `settings` are changes to the experiment, `path=value`; `mesh` has the sizes of its axes, and
    `sharding` the axes of each letter. `tokens_per_core` are a batch's target tokens. `suspicious`
    describes what a well partitioned program would not have. A program fits if the compiler
    accepts it; otherwise it has no cost. Lowering goes from the layers to an exported program,
    compiling from there to the cores' own program; its CPU seconds are those of all threads.
    `host_peak_gib` is the most memory that the planning process held on this machine.
    """

    model: str
    settings: tuple[str, ...]
    topology: str
    mesh: dict[str, int]
    sharding: dict[str, str]
    cores: int
    weights: int
    tokens_per_core: float
    fits: bool
    memory_gib: Memory
    largest_buffers: tuple[Buffer, ...]
    suspicious: tuple[str, ...]
    cost: StepCost | None
    lower_secs: float
    compile_secs: float
    compile_cpu_secs: float
    host_peak_gib: float

    def steps_per_sec(self, share: float = 1.0) -> float:
        """The rate at a share of the roofline; 0 if the program does not fit."""
        return share / self.cost.roofline_secs.step if self.cost else 0.0

    def tokens_per_sec(self, share: float = 1.0) -> float:
        """The target tokens per second of all cores at a share of the roofline."""
        return self.steps_per_sec(share) * self.tokens_per_core * self.cores

    def core_years(self, share: float = 1.0) -> float:
        """The core-years of 10^12 tokens; infinity if the program does not fit."""
        rate = self.tokens_per_sec(share)
        return self.cores * _TRAINING_TOKENS / rate / _SECS_PER_YEAR if rate else float("inf")


def save(plan: Plan, folder: pathlib.Path) -> None:
    """Writes folder/plan.json: the fields of the plan and of its cost, and the rates they imply.

    If the plan does not fit, the fields of the cost and the rates are null.
    """
    values = dataclasses.asdict(plan)
    values |= values.pop("cost") or {field.name: None for field in dataclasses.fields(StepCost)}
    rates = {
        "steps_per_sec": plan.steps_per_sec,
        "tokens_per_sec": plan.tokens_per_sec,
        "core_years_of_1e12_tokens": plan.core_years,
    }
    for name, rate in rates.items():
        at_shares = {"at_roofline": rate(1.0), "at_papers_share": rate(PAPERS_SHARE)}
        values[name] = at_shares if plan.cost else None
    folder.mkdir(parents=True, exist_ok=True)
    atomic_file.write(folder / PLAN_JSON, json.dumps(values, indent=2) + "\n")


def load(folder: pathlib.Path) -> Plan:
    """Reads a saved plan. Raises ValueError if there is none, or it is damaged or outdated."""
    path = folder / PLAN_JSON
    if not path.is_file():
        raise ValueError(f"{folder}: no {PLAN_JSON} there; `plan --out={folder}` makes one.")
    try:
        values = json.loads(path.read_text())
        cost = json_records.read(StepCost, values) if values["fits"] else None
        return json_records.read(Plan, {**values, "cost": cost})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged or of another version: {error!r}.") from error
