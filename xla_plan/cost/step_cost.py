"""The work and the collectives of a call of a program, and its time at the roofline."""

import dataclasses
from typing import Self

from xla_plan.cost.work import WorkSum


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a call of a program, or of a part of it, at the roofline."""

    compute: float = 0.0  # Flops over the peak rate.
    memory: float = 0.0  # Bytes over the memory's bandwidth.
    network: float = 0.0  # The time of collectives.
    step: float = 0.0  # The sum over instructions of max(compute, memory), plus network.

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
    """All collectives of a kind from one layer, and one line of it, in a call."""

    kind: str
    count: int
    bytes: int  # The size of the results on one core.
    source: str  # The layer.
    line: str | None = None  # The user's line, such as `model.py:12`; None if it is not known.


@dataclasses.dataclass(frozen=True)
class ProductRate:
    """The peak rate at which products of one kind are counted."""

    arithmetic: str  # The arithmetic in the program, such as `f32`; see xla_spmd/hlo/products.py.
    counted_as: str  # The machine's arithmetic, such as `tf32`.
    flops_per_sec: float
    flops: float  # The flops of all such products of a call, on one core.


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The work and the collectives of a call of a program, and its time.

    A loop counts as often as it can run at most (xla_spmd/hlo/trip_counts.py).
    """

    collectives: tuple[CollectiveSum, ...]  # The most bytes first.
    flops_per_core: dict[str, float]  # The flops of matrix products, by category.
    roofline_secs: Times  # Our roofline of the whole call.
    roofline_secs_by_category: dict[str, Times]
    network_secs_by_kind: dict[str, float]
    roofline_secs_by_pass: dict[str, Times]  # By scopes.Pass.
    # The part that repeats the forward pass for the gradient (rematerialization, section 5.1).
    recomputed_flops_per_core: float
    # XLA's optimal_seconds, with loop bodies times their trip counts; 0 if XLA reports no time.
    xla_optimal_secs: float
    xla_optimal_secs_once: float  # XLA's own optimal_seconds: it counts each loop body once.
    instructions: int  # The number of instructions in all computations.
    uncounted_loops: tuple[str, ...]  # The layers of loops of unknown length, counted once.
    # Kernels and other custom calls whose bytes are counted. Their flops are unknown and left out.
    uncounted_kernels: tuple[str, ...] = ()
    # The part of the network's time during which, by the schedule, a core computes. It is included
    # in roofline_secs, whose parts add up, and not in step_secs.
    overlapped_secs: float = 0.0
    product_rates: tuple[ProductRate, ...] = ()  # The most flops first.
    # The layers of the conditionals, loops and ragged operations that the data decide, and the time
    # and flops of the call in which they do the least work. All other figures assume the most work.
    by_data: tuple[str, ...] = ()
    least_step_secs: float | None = None  # None if no operation depends on the data.
    least_flops_per_core: float | None = None
    # The part of step_secs that attention kernels take; 0 if matrix products compute attention.
    attention_secs: float = 0.0
    work: tuple[WorkSum, ...] = ()  # The same work by size, for measured rates.

    @property
    def step_secs(self) -> float:
        """The time of a call at the roofline, where overlapping parts count once."""
        return self.roofline_secs.step - self.overlapped_secs

    @property
    def share_by_data(self) -> float:
        """The share of step_secs that only some data need; 0 if no operation depends on data."""
        if self.least_step_secs is None or not self.step_secs:
            return 0.0
        return 1 - self.least_step_secs / self.step_secs

    @property
    def recomputed_flops_share(self) -> float:
        """The share of the flops of products that repeat the forward pass; 0 without products."""
        all_flops = sum(self.flops_per_core.values())
        return self.recomputed_flops_per_core / all_flops if all_flops else 0.0

    @property
    def recomputed_time_share(self) -> float:
        """The share of the roofline's time that repeats the forward pass."""
        recomputed = self.roofline_secs_by_pass.get("recomputed", Times())
        return recomputed.step / self.roofline_secs.step
