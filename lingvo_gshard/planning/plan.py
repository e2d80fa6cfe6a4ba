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

    Attributes:
      compute: flops over the peak rate.
      memory: bytes over the memory's bandwidth.
      network: the time of collectives on the torus.
      step: the sum over instructions of the longer of compute and memory time, plus network.
    """

    compute: float
    memory: float
    network: float
    step: float

    def __add__(self, other: Times) -> Times:
        return Times(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


NOTHING = Times(0.0, 0.0, 0.0, 0.0)


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
      roofline_secs_by_category: the same by category.
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

    Attributes:
      model: the experiment's registered name.
      settings: the changes to the experiment, `path=value`.
      topology: a name such as `v3:32x32`.
      mesh: the sizes of the mesh's axes by name.
      sharding: the table from letters of dims to axes.
      cores: the number of partitions.
      weights: the number of scalars in all weights.
      tokens_per_core: target tokens of a batch over the cores.
      fits: whether the compiler accepts the program.
      memory_gib: the memory of one core.
      largest_buffers: the largest tensors on one core.
      suspicious: what a well partitioned program would not have, in words.
      cost: the cost of a step; None if the program does not fit.
      lower_secs: the time from the layers to an exported program.
      compile_secs: the time from there to the cores' own program.
      compile_cpu_secs: the same, summed over all threads.
      host_peak_gib: the most memory that the planning process held on this machine.
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
        """Returns the rate at a share of the roofline; 0 if the program does not fit."""
        return share / self.cost.roofline_secs.step if self.cost else 0.0

    def tokens_per_sec(self, share: float = 1.0) -> float:
        """Returns the target tokens per second of all cores at a share of the roofline."""
        return self.steps_per_sec(share) * self.tokens_per_core * self.cores

    def core_years(self, share: float = 1.0) -> float:
        """Returns the core-years of 10^12 tokens; infinity if the program does not fit."""
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
    """Reads what `save` wrote.

    Raises:
      ValueError: the folder holds no plan, or one that is damaged or of another version.
    """
    path = folder / PLAN_JSON
    if not path.is_file():
        raise ValueError(f"{folder}: no {PLAN_JSON} there; `plan --out={folder}` makes one.")
    try:
        values = json.loads(path.read_text())
        cost = json_records.read(StepCost, values) if values["fits"] else None
        return json_records.read(Plan, {**values, "cost": cost})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged or of another version: {error!r}.") from error
