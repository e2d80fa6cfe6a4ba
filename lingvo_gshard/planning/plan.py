"""A plan: what one training step of an experiment needs and costs on a topology; plan.json."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from lingvo_gshard.planning.memory import Buffer, Memory
from lingvo_gshard.planning.roofline import Times

PLAN_JSON = "plan.json"

# The share of its roofline that the paper measured of MoE(2048E, 36L) (section 5.2).
PAPERS_SHARE = 0.48
_SECS_PER_YEAR = 365.25 * 24 * 3600
_TRAINING_TOKENS = 1e12


@dataclasses.dataclass(frozen=True)
class CollectiveSum:
    """All collectives of one kind from one layer.

    Attributes:
      kind: as the compiled program names it.
      count: how many run in a step, loops followed.
      bytes: of their results on one core in a step.
      source: the layer.
    """

    kind: str
    count: int
    bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step computes, moves and takes; known only of a program that the compiler accepts.

    Attributes:
      collectives: by kind and source, the most bytes first.
      flops_per_core: of the products of a step, by category.
      model_flops_per_core: those that the mathematics asks for, by model/flops.
      roofline_secs: ours, of the whole step.
      roofline_secs_by_category: the same, by category.
      network_secs_by_kind: of the collectives of each kind.
      xla_optimal_secs: XLA's optimal_seconds, loop bodies times their trip counts. XLA counts a
        body once; the factor between is that of planning/roofline.loop_factor, 1 without loops.
      xla_optimal_secs_once: what XLA says.
      instructions: of all computations.
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
      model: its registered name.
      settings: what was changed in the experiment, `path=value`.
      topology: such as `v3:32x32`.
      mesh: sizes of its axes by name.
      sharding: from letters of dims to axes.
      cores: partitions.
      weights: scalars in all weights.
      tokens_per_core: target tokens of a batch, over the cores.
      fits: whether the compiler accepts it.
      memory_gib: of one core.
      largest_buffers: on one core.
      suspicious: what should not be in such a program.
      cost: None where it does not fit.
      lower_secs: from the layers to an exported program.
      compile_secs: from that to the cores' own program.
      compile_cpu_secs: the same, of all threads together.
      host_peak_gib: of this machine's memory, the whole process.
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
    cost: Cost | None
    lower_secs: float
    compile_secs: float
    compile_cpu_secs: float
    host_peak_gib: float

    def steps_per_sec(self, share: float = 1.0) -> float:
        """At a share of the roofline; 0 where the program does not fit."""
        return share / self.cost.roofline_secs.step if self.cost else 0.0

    def tokens_per_sec(self, share: float = 1.0) -> float:
        """Target tokens a second of all cores, at a share of the roofline."""
        return self.steps_per_sec(share) * self.tokens_per_core * self.cores

    def core_years(self, share: float = 1.0) -> float:
        """Core-years of 10^12 tokens, at a share of the roofline; infinite if it does not fit."""
        rate = self.tokens_per_sec(share)
        return self.cores * _TRAINING_TOKENS / rate / _SECS_PER_YEAR if rate else float("inf")


def save(plan: Plan, folder: pathlib.Path) -> None:
    """Writes folder/plan.json: the fields of Plan and of its cost beside each other (null where it
    does not fit), and what follows from them."""
    values = dataclasses.asdict(plan)
    cost = values.pop("cost") or {field.name: None for field in dataclasses.fields(Cost)}
    derived = {
        name: {"at_roofline": at(1.0), "at_papers_share": at(PAPERS_SHARE)} if plan.cost else None
        for name, at in (
            ("steps_per_sec", plan.steps_per_sec),
            ("tokens_per_sec", plan.tokens_per_sec),
            ("core_years_of_1e12_tokens", plan.core_years),
        )
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / (PLAN_JSON + ".partial")
    partial.write_text(json.dumps({**values, **cost, **derived}, indent=2) + "\n")
    partial.replace(folder / PLAN_JSON)  # A reader never sees half a plan.


def load(folder: pathlib.Path) -> Plan:
    """Reads what `save` wrote.

    Raises:
      ValueError: no plan there, or not one of this version.
    """
    path = folder / PLAN_JSON
    if not path.is_file():
        raise ValueError(f"{folder}: no {PLAN_JSON} there; `plan --out={folder}` makes one.")
    try:
        return _from_json(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged or of another version: {error!r}.") from error


def _from_json(values: dict[str, Any]) -> Plan:
    plan, cost = ({f.name: values[f.name] for f in _stored(kind)} for kind in (Plan, Cost))
    plan |= {
        "settings": tuple(plan["settings"]),
        "memory_gib": Memory(**plan["memory_gib"]),
        "largest_buffers": tuple(Buffer(**each) for each in plan["largest_buffers"]),
        "suspicious": tuple(plan["suspicious"]),
    }
    if not plan["fits"]:
        return Plan(**plan, cost=None)
    cost |= {
        "collectives": tuple(CollectiveSum(**each) for each in cost["collectives"]),
        "roofline_secs": Times(**cost["roofline_secs"]),
        "roofline_secs_by_category": {
            name: Times(**secs) for name, secs in cost["roofline_secs_by_category"].items()
        },
    }
    return Plan(**plan, cost=Cost(**cost))


def _stored(kind: type) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(kind) if field.name != "cost"]
