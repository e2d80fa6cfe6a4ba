"""Trials of a search: compiled alternatives with their plans."""

import dataclasses

from xla_plan.cost.step_cost import Times
from xla_plan.plans.program_plan import ProgramPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """An alternative that was compiled: its plan, or the reason of the refusal."""

    name: str
    plan: ProgramPlan | None
    refusal: str = ""
    estimated_secs: float | None = None  # The time of a call before it was compiled, if estimated.

    @property
    def fits(self) -> bool:
        """Whether a call can run."""
        return self.plan is not None and self.plan.fits

    @property
    def secs(self) -> Times:
        """The times at the roofline, where the step counts overlapping parts once.

        The step is infinite if the program cannot run.
        """
        if self.plan is None or self.plan.cost is None:
            return Times(step=float("inf"))
        return dataclasses.replace(self.plan.cost.roofline_secs, step=self.plan.step_secs)


@dataclasses.dataclass(frozen=True)
class Gain:
    """Why a step is faster than another one."""

    times_as_fast: float
    resource: str  # Where most of the time is saved.
    saved_secs: float  # In that resource.


def gain(best: Times, second: Times) -> Gain:
    """Returns the gain of the best step over the second."""
    # A resource where the best step takes longer has a negative gain.
    saved_secs = {
        "memory": second.memory - best.memory,
        "network": second.network - best.network,
        "compute": second.compute - best.compute,
    }
    most = max(saved_secs, key=saved_secs.__getitem__)
    return Gain(second.step / best.step, most, saved_secs[most])
