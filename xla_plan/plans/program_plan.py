"""The plan of a program: the memory, the work and the time of a call on a topology."""

import dataclasses
import math
from typing import Any

from xla_plan.cost.memory import Buffer, Memory
from xla_plan.cost.step_cost import StepCost
from xla_plan.expected import factors
from xla_plan.expected.factors import Factor, Shares


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a call and a row's lengths in tokens.

    For a search, source_len is the length of the decoded source, and target_len the number of
    steps. Otherwise, a task without a source has a source_len of 0.
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
    """The memory, the work and the time of a call of a program on a topology."""

    name: str
    topology: str
    mesh: dict[str, int]  # The sizes of its axes.
    fits: bool  # Whether the compiler accepts it and its peak is within the capacity.
    memory_gib: Memory
    largest_buffers: tuple[Buffer, ...]
    suspicious: tuple[str, ...]  # Signs of a bad partitioning.
    cost: StepCost | None  # None if it does not fit.
    lower_secs: float  # The time from layers, a function or a file to a program for all devices.
    compile_secs: float  # The time to compile it to the program of one device.
    compile_cpu_secs: float  # The same time, summed over all threads.
    batch: Batch | None = None  # None if the planner does not know a call's arguments.

    @property
    def cores(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    @property
    def step_secs(self) -> float:
        """The time of a call at the roofline; infinite if it does not fit."""
        return float("inf") if self.cost is None else self.cost.step_secs

    @property
    def shares(self) -> Shares | None:
        """The shares of the kinds of work in the bound; None if the program does not fit."""
        if self.cost is None:
            return None
        products_secs = self.cost.roofline_secs.compute
        return factors.shares_of(self.step_secs, self.cost.attention_secs, products_secs)

    @property
    def factor(self) -> Factor | None:
        """The share of their bounds that published steps on this machine reach.

        It is None without such steps. Raises ValueError if their file is damaged.
        """
        return factors.of_topology(self.topology, self.shares)

    def tokens_per_sec(self) -> float:
        """Returns the target tokens per second of all cores at the roofline; 0 without a cost."""
        if self.cost is None or self.batch is None:
            return 0.0
        return self.batch.target_tokens / self.cost.step_secs

    def derived(self) -> dict[str, Any]:
        """Returns the figure that follows from the fields: the expected time of a training step."""
        return {"expected": expected(self)}


def expected(plan: ProgramPlan) -> dict[str, Any] | None:
    """Returns the expected time as JSON; None without published steps, or if it does not fit.

    Raises ValueError if the file of the published steps is damaged.
    """
    factor = plan.factor
    if factor is None or plan.cost is None:
        return None
    return factor.as_json(plan.cost.step_secs)
