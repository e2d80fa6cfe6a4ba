"""The plan of an experiment: the plans of its programs, and a little about the run."""

import dataclasses
import pathlib
from typing import Any

from xla_plan.expected.factors import Factor
from xla_plan.plans import plan_folder, program_plan
from xla_plan.plans.program_plan import ProgramPlan

# The programs of a run, in the order of a plan; run_programs.py describes them.
TRAIN = "train"
INITIALIZE = "initialize"
EVALUATE = "evaluate"
DECODE = "decode"
PROGRAMS = (TRAIN, INITIALIZE, EVALUATE, DECODE)

SECS_PER_YEAR = 365.25 * 24 * 3600
TRAINING_TOKENS = 1e12  # Table 3 gives the core-years of this number of tokens.


@dataclasses.dataclass(frozen=True)
class Plan:
    """One experiment on one topology."""

    model: str
    settings: tuple[str, ...]  # Changes to the experiment, `path=value`.
    sharding: dict[str, str]  # The axes of each letter.
    weights: int
    model_flops_per_core: float  # The flops of a training step's mathematics alone.
    host_peak_gib: float  # The most memory that a planning process held on this machine.
    programs: dict[str, ProgramPlan]  # By name, such as TRAIN; one or more.
    bubble: float = 0.0  # The share of a pipeline's ticks in which a stage is idle.
    unit: str = "target token"  # The unit of a row's target_len.
    dispatch: str | None = None  # How tokens reach experts, such as `EINSUM`; None if dense.
    remat: str | None = None  # What gradients recompute, such as `BLOCK`; None without stacks.

    @property
    def has_step(self) -> bool:
        """Whether the training step is among the programs."""
        return TRAIN in self.programs

    @property
    def step(self) -> ProgramPlan:
        """The training step. Raises ValueError for a plan without one."""
        if not self.has_step:
            raise ValueError(
                f"the plan of {self.model} on {self.topology} has no training step; "
                "`plan model --programs=train` with the same --out adds it."
            )
        return self.programs[TRAIN]

    @property
    def main(self) -> ProgramPlan:
        """The program that a report describes in full: the training step, if it is planned."""
        return next(iter(self.programs.values()))

    @property
    def topology(self) -> str:
        """The topology of all programs."""
        return self.main.topology

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh's axes, in all programs."""
        return self.main.mesh

    @property
    def cores(self) -> int:
        """The number of devices."""
        return self.main.cores

    @property
    def noun(self) -> str:
        """The unit of rates, in one word."""
        return self.unit.split()[-1]

    @property
    def tokens_per_core(self) -> float:
        """The target tokens of a training batch for each core."""
        assert self.step.batch is not None  # All programs of an experiment have a batch.
        return self.step.batch.target_tokens / self.cores

    @property
    def factor(self) -> Factor | None:
        """The share of their bounds that published steps on this machine reach.

        It is None without such steps. Raises ValueError if their file is damaged.
        """
        return self.main.factor

    @property
    def all_fit(self) -> bool:
        """Whether every program fits."""
        return all(program.fits for program in self.programs.values())

    def steps_per_sec(self, share: float = 1.0) -> float:
        """Returns the rate of training at a share of the roofline; 0 if a step does not fit."""
        return share / self.step.step_secs

    def tokens_per_sec(self, share: float = 1.0) -> float:
        """Returns the target tokens per second of all cores at a share of the roofline."""
        return share * self.step.tokens_per_sec()

    def core_years(self, share: float = 1.0) -> float:
        """Returns the core-years of 10^12 tokens; infinity if a step does not fit."""
        rate = self.tokens_per_sec(share)
        if rate == 0:
            return float("inf")
        return self.cores * TRAINING_TOKENS / rate / SECS_PER_YEAR

    def derived(self) -> dict[str, Any]:
        """Returns the figures of the training step that follow from the fields, as JSON.

        They are null without a training step, or if it does not fit: JSON lacks infinity.
        """
        rates = {
            "steps_per_sec": self.steps_per_sec,
            "tokens_per_sec": self.tokens_per_sec,
            "core_years_of_1e12_tokens": self.core_years,
        }
        values: dict[str, Any] = {
            "all_fit": self.all_fit,
            "expected": None,
            "tokens_per_core": None,
        }
        values |= dict.fromkeys(rates)
        if not self.has_step:
            return values

        values["tokens_per_core"] = self.tokens_per_core
        values["expected"] = program_plan.expected(self.step)
        if self.step.fits:
            factor = self.factor
            for name, rate in rates.items():
                expected = None if factor is None else rate(factor.value)
                values[name] = {"at_roofline": rate(1.0), "expected": expected}
        return values


def load_any(folder: pathlib.Path) -> Plan | ProgramPlan:
    """Returns the saved plan of an experiment, or of a program alone.

    Raises ValueError if it is missing, damaged or outdated.
    """
    try:
        return plan_folder.load(ProgramPlan, folder)
    except ValueError:
        return plan_folder.load(Plan, folder)
