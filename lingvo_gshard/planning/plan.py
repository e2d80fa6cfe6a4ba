"""A plan: what an experiment's programs need and cost on a topology; plan.json."""

import dataclasses
import json
import operator
import pathlib
from typing import Self

from lingvo_gshard.files import atomic_file, json_records
from lingvo_gshard.planning.memory import Buffer, Memory

PLAN_JSON = "plan.json"
# Every plan has the first; planning/programs.py describes them.
TRAIN, INITIALIZE, EVALUATE, DECODE = PROGRAMS = ("train", "initialize", "evaluate", "decode")
# The share of the roofline that the paper measured for MoE(2048E, 36L) (section 5.2).
PAPERS_SHARE = 0.48
_SECS_PER_YEAR = 365.25 * 24 * 3600
_TRAINING_TOKENS = 1e12


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a call of a program, or of a part of it, at the roofline."""

    compute: float = 0.0  # Flops over the peak rate.
    memory: float = 0.0  # Bytes over the memory's bandwidth.
    network: float = 0.0  # The time of collectives.
    step: float = 0.0  # The sum over instructions of the longer of the first two, plus network.

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclasses.dataclass(frozen=True)
class CollectiveSum:
    """All collectives of a kind from one layer in a call; `bytes` are the results' on one core."""

    kind: str
    count: int
    bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a call of a program computes and sends, and how long it takes.

    A loop counts as often as it can run at most (hlo/trip_counts.py).
    """

    collectives: tuple[CollectiveSum, ...]  # One for each kind and source, most bytes first.
    flops_per_core: dict[str, float]  # Those of matrix products, by category.
    roofline_secs: Times  # Our roofline of the whole call.
    roofline_secs_by_category: dict[str, Times]
    network_secs_by_kind: dict[str, float]
    xla_optimal_secs: float  # XLA's optimal_seconds, with loop bodies times their trip counts.
    xla_optimal_secs_once: float  # XLA's optimal_seconds as they are, each loop body once.
    instructions: int  # In all computations.
    uncounted_loops: tuple[str, ...]  # Where loops of unknown length, counted once, come from.


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a call and a row's lengths in tokens; for a search, target_len is its steps."""

    rows: int
    source_len: int
    target_len: int

    @property
    def target_tokens(self) -> int:
        return self.rows * self.target_len


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One program of a run, such as its training step."""

    batch: Batch
    fits: bool  # Whether the compiler accepts it.
    memory_gib: Memory
    largest_buffers: tuple[Buffer, ...]
    suspicious: tuple[str, ...]  # What a well partitioned program would not have.
    cost: StepCost | None  # None if it does not fit.
    lower_secs: float  # From the layers to an exported program.
    compile_secs: float  # From there to the cores' own program.
    compile_cpu_secs: float  # Those of all threads.

    def tokens_per_sec(self) -> float:
        """The target tokens per second of all cores at the roofline; 0 if it does not fit."""
        return self.batch.target_tokens / self.cost.roofline_secs.step if self.cost else 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """One experiment on one topology."""

    model: str
    settings: tuple[str, ...]  # Changes to the experiment, `path=value`.
    topology: str
    mesh: dict[str, int]  # The sizes of its axes.
    sharding: dict[str, str]  # The axes of each letter.
    cores: int
    weights: int
    model_flops_per_core: float  # What the mathematics of a training step asks for.
    host_peak_gib: float  # The most memory that a planning process held on this machine.
    programs: dict[str, ProgramPlan]  # The training step, and others of the run (programs.py).
    bubble: float = 0.0  # The share of a pipeline's ticks in which a stage has no microbatch.

    @property
    def step(self) -> ProgramPlan:
        """The training step."""
        return self.programs[TRAIN]

    @property
    def tokens_per_core(self) -> float:
        """The target tokens of a training batch for each core."""
        return self.step.batch.target_tokens / self.cores

    @property
    def all_fit(self) -> bool:
        return all(each.fits for each in self.programs.values())

    @property
    def verdict(self) -> str:
        """Whether all programs fit, or which of them do not."""
        unfit = (name for name, program in self.programs.items() if not program.fits)
        return "fits" if self.all_fit else f"does NOT fit: {', '.join(unfit)}"

    def steps_per_sec(self, share: float = 1.0) -> float:
        """The rate of training at a share of the roofline; 0 if a step does not fit."""
        return share / self.step.cost.roofline_secs.step if self.step.cost else 0.0

    def tokens_per_sec(self, share: float = 1.0) -> float:
        """The target tokens per second of all cores at a share of the roofline."""
        return share * self.step.tokens_per_sec()

    def core_years(self, share: float = 1.0) -> float:
        """The core-years of 10^12 tokens; infinity if the program does not fit."""
        rate = self.tokens_per_sec(share)
        return self.cores * _TRAINING_TOKENS / rate / _SECS_PER_YEAR if rate else float("inf")


def save(plan: Plan, folder: pathlib.Path) -> None:
    """Writes folder/plan.json: the plan's fields, its training step's, and the rates they imply.

    If the training step does not fit, the fields of its cost and the rates are null.
    """
    values, step = dataclasses.asdict(plan), dataclasses.asdict(plan.step)
    cost = step.pop("cost") or {field.name: None for field in dataclasses.fields(StepCost)}
    values |= step | cost
    values |= {"all_fit": plan.all_fit, "tokens_per_core": plan.tokens_per_core}
    for name, rate in (
        ("steps_per_sec", plan.steps_per_sec),
        ("tokens_per_sec", plan.tokens_per_sec),
        ("core_years_of_1e12_tokens", plan.core_years),
    ):
        at_shares = {"at_roofline": rate(1.0), "at_papers_share": rate(PAPERS_SHARE)}
        values[name] = at_shares if plan.step.cost else None
    folder.mkdir(parents=True, exist_ok=True)
    atomic_file.write(folder / PLAN_JSON, json.dumps(values, indent=2) + "\n")


def load(folder: pathlib.Path) -> Plan:
    """Reads a saved plan. Raises ValueError if there is none, or it is damaged or outdated."""
    path = folder / PLAN_JSON
    if not path.is_file():
        raise ValueError(f"{folder}: no {PLAN_JSON} there; `plan --out={folder}` makes one.")
    try:
        return json_records.read(Plan, json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or outdated ({error!r}); plan again.") from error
