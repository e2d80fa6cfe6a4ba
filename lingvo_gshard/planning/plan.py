"""A plan: what an experiment's programs need and cost on a topology; plan.json."""

import dataclasses
import json
import pathlib
from typing import Any, Self

from lingvo_gshard.files import atomic_file, digests, json_records
from lingvo_gshard.planning.published import factors
from lingvo_gshard.planning.published.factors import Factor

PLAN_JSON = "plan.json"
GIB = 2.0**30

# The programs of a run, in the order of a plan; compiled/run_programs.py describes them.
TRAIN = "train"
INITIALIZE = "initialize"
EVALUATE = "evaluate"
DECODE = "decode"
PROGRAMS = (TRAIN, INITIALIZE, EVALUATE, DECODE)

SECS_PER_YEAR = 365.25 * 24 * 3600
TRAINING_TOKENS = 1e12  # Table 3 gives the core-years of so many tokens.


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a call of a program, or of a part of it, at the roofline."""

    compute: float = 0.0  # Flops over the peak rate.
    memory: float = 0.0  # Bytes over the memory's bandwidth.
    network: float = 0.0  # The time of collectives.
    step: float = 0.0  # The sum over instructions of the longer of the first two, plus network.

    def __add__(self, other: Self) -> Self:
        return type(self)(
            compute=self.compute + other.compute,
            memory=self.memory + other.memory,
            network=self.network + other.network,
            step=self.step + other.step,
        )

    def scaled(self, factor: float) -> Self:
        """Returns the times of `factor` such parts."""
        return type(self)(
            compute=factor * self.compute,
            memory=factor * self.memory,
            network=factor * self.network,
            step=factor * self.step,
        )


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
    # What of all this repeats the forward pass for the gradient (rematerialization, section 5.1).
    recomputed_flops_per_core: float
    recomputed_secs: Times
    # XLA's optimal_seconds, with loop bodies times their trip counts; 0 if XLA gives none.
    xla_optimal_secs: float
    xla_optimal_secs_once: float  # XLA's optimal_seconds as they are, each loop body once.
    instructions: int  # In all computations.
    uncounted_loops: tuple[str, ...]  # The layers of loops of unknown length, counted once.
    # Kernels whose bytes are counted, but not what they compute, which nobody gives.
    uncounted_kernels: tuple[str, ...] = ()
    # The part of the network's time in which, by the schedule, a core computes. It is in
    # roofline_secs, whose parts add up, and not in step_secs.
    overlapped_secs: float = 0.0

    @property
    def step_secs(self) -> float:
        """The time of a call at the roofline: what overlaps counts once."""
        return self.roofline_secs.step - self.overlapped_secs

    @property
    def recomputed_flops_share(self) -> float:
        """The share of the flops of products that repeat the forward pass; 0 without products."""
        all_flops = sum(self.flops_per_core.values())
        return self.recomputed_flops_per_core / all_flops if all_flops else 0.0

    @property
    def recomputed_time_share(self) -> float:
        """The share of the roofline's time that repeats the forward pass."""
        return self.recomputed_secs.step / self.roofline_secs.step


@dataclasses.dataclass(frozen=True)
class Memory:
    """GiB of one core, as in Figure 7 but with the optimizer's slots apart."""

    capacity: float  # What the compiler leaves to a program.
    replicated_weights: float  # All weights but those of experts.
    expert_weights: float  # The weights that have a dim E.
    optimizer_slots: float  # The slots of both.
    temporaries: float  # Activations and whatever else is made during the step.
    # The most held at once, including the batch; of a refused program, what the compiler wanted
    # when it gave up. It may be less than the parts' sum, since temporaries may reuse donated
    # arguments that are no longer needed.
    peak: float


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A tensor on one core: its GiB, its shape there, and the layer that it comes from."""

    gib: float
    shape: str
    source: str


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a call and a row's lengths in tokens.

    For a search, source_len is the length of what is decoded, and target_len its steps. A task
    without a source has a source_len of 0 elsewhere.
    """

    rows: int
    source_len: int
    target_len: int

    @property
    def target_tokens(self) -> int:
        """The number of target tokens in a call."""
        return self.rows * self.target_len


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One program of a run, such as its training step."""

    batch: Batch
    fits: bool  # Whether the compiler accepts it and its peak is within the capacity.
    memory_gib: Memory
    largest_buffers: tuple[Buffer, ...]
    suspicious: tuple[str, ...]  # What a well partitioned program would not have.
    cost: StepCost | None  # None if it does not fit.
    lower_secs: float  # From the layers to an exported program.
    compile_secs: float  # From there to the cores' own program.
    compile_cpu_secs: float  # Those of all threads.

    def tokens_per_sec(self) -> float:
        """Returns the target tokens per second of all cores at the roofline; 0 if unfit."""
        if self.cost is None:
            return 0.0
        return self.batch.target_tokens / self.cost.step_secs


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
    programs: dict[str, ProgramPlan]  # By name, such as TRAIN.
    bubble: float = 0.0  # The share of a pipeline's ticks in which a stage has no microbatch.
    unit: str = "target token"  # What a row's target_len counts.

    @property
    def has_step(self) -> bool:
        """Whether the training step is among the programs."""
        return TRAIN in self.programs

    @property
    def step(self) -> ProgramPlan:
        """The training step. Raises ValueError for a plan that has none."""
        if not self.has_step:
            raise ValueError(
                f"the plan of {self.model} on {self.topology} has no training step; "
                "`plan --programs=train` with the same --out adds it."
            )
        return self.programs[TRAIN]

    @property
    def main(self) -> str:
        """The name of the program that is told in full: the training step, if it is planned."""
        return next(iter(self.programs))

    @property
    def noun(self) -> str:
        """What rates count, in one word."""
        return self.unit.split()[-1]

    @property
    def tokens_per_core(self) -> float:
        """The target tokens of a training batch for each core."""
        return self.step.batch.target_tokens / self.cores

    @property
    def factor(self) -> Factor | None:
        """The share of their bounds that published steps on this machine reach.

        None if there are none. Raises ValueError as factors.of_topology.
        """
        return factors.of_topology(self.topology)

    @property
    def all_fit(self) -> bool:
        """Whether every program fits."""
        return all(program.fits for program in self.programs.values())

    def steps_per_sec(self, share: float = 1.0) -> float:
        """Returns the rate of training at a share of the roofline; 0 if a step does not fit."""
        if self.step.cost is None:
            return 0.0
        return share / self.step.cost.step_secs

    def tokens_per_sec(self, share: float = 1.0) -> float:
        """Returns the target tokens per second of all cores at a share of the roofline."""
        return share * self.step.tokens_per_sec()

    def core_years(self, share: float = 1.0) -> float:
        """Returns the core-years of 10^12 tokens; infinity if a step does not fit."""
        rate = self.tokens_per_sec(share)
        if rate == 0:
            return float("inf")
        return self.cores * TRAINING_TOKENS / rate / SECS_PER_YEAR


def save(plan: Plan, folder: pathlib.Path) -> None:
    """Writes folder/plan.json: the plan's fields, its training step's, and the rates they imply.

    If the training step does not fit, the fields of its cost and the rates are null. Without a
    training step all of its fields are. Raises ValueError as factors.of_topology.
    """
    # The training step's fields stand at the top as well as among the programs, since most readers
    # of the file want it alone.
    step_cost = plan.step.cost if plan.has_step else None
    step: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(ProgramPlan))
    if plan.has_step:
        step = dataclasses.asdict(plan.step)
    del step["cost"]
    cost: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(StepCost))
    if step_cost is not None:
        cost = dataclasses.asdict(step_cost)

    values = dataclasses.asdict(plan) | step | cost
    values["all_fit"] = plan.all_fit
    values["tokens_per_core"] = plan.tokens_per_core if plan.has_step else None

    # What the bound is worth, by steps that others measured on this machine.
    factor = plan.factor
    values["expected"] = None
    if factor is not None and step_cost is not None:
        values["expected"] = factor.as_json(step_cost.step_secs)

    # What follows from the fields, at the roofline and as expected.
    rates = {
        "steps_per_sec": plan.steps_per_sec,
        "tokens_per_sec": plan.tokens_per_sec,
        "core_years_of_1e12_tokens": plan.core_years,
    }
    for name, rate in rates.items():
        if step_cost is None:
            values[name] = None  # JSON has no infinity.
        else:
            expected = None if factor is None else rate(factor.value)
            values[name] = {"at_roofline": rate(1.0), "expected": expected}

    folder.mkdir(parents=True, exist_ok=True)
    atomic_file.write(folder / PLAN_JSON, json.dumps(digests.with_digest(values), indent=2) + "\n")


def load(folder: pathlib.Path) -> Plan:
    """Returns a saved plan. Raises ValueError if there is none, or it is damaged or outdated."""
    path = folder / PLAN_JSON
    if not path.is_file():
        raise ValueError(f"{folder}: no {PLAN_JSON} there; `plan --out={folder}` makes one.")

    # What plan.json repeats at its top is no field of a plan and is left aside.
    try:
        values = json_records.parse(path.read_bytes())
        plan: Plan = json_records.read(Plan, values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or outdated ({error!r}); plan again.") from error
    if not digests.pop_digest(values):
        raise ValueError(f"{path} is damaged or outdated: its digest is not that of its contents.")
    return plan
