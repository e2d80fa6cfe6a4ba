"""Trials: alternatives to a request, each with the plan of its training step."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from lingvo_gshard.planning import kept_plans
from lingvo_gshard.planning.plan import Plan, Times
from lingvo_gshard.planning.request import Request


@dataclasses.dataclass(frozen=True)
class Trial:
    """An alternative and the plan of its training step, or the reason why there is none."""

    name: str
    request: Request
    folder: pathlib.Path
    plan: Plan | None
    refusal: str = ""
    estimated_secs: float = 0.0  # The cost model's time of a step, 0 if it was not asked.

    @property
    def secs(self) -> Times:
        """The times at the roofline, of which the step's counts what overlaps once.

        The step is infinite if it cannot run.
        """
        cost = self.plan.step.cost if self.plan else None
        if cost is None:
            return Times(step=float("inf"))
        return dataclasses.replace(cost.roofline_secs, step=cost.step_secs)

    @property
    def fits(self) -> bool:
        """Whether a step can run."""
        return self.plan is not None and self.plan.step.fits


def compile_trial(
    request: Request, settings: Sequence[str], folder: pathlib.Path, name: str = ""
) -> Trial:
    """Plans a step with more settings, in a folder of its own in `folder`.

    Its name is by default that of the settings.
    """
    # The name of the folder is one that every file system takes.
    name = name or " ".join(settings)
    changed = request.changed(settings)
    trial_folder = folder / re.sub(r"\W+", "_", name).strip("_")

    try:
        plan = kept_plans.load_or_make(changed.step_only(), trial_folder)
    except ValueError as error:  # Mostly dims that the mesh does not divide.
        refusal = str(error).splitlines()[0]
        return Trial(name, changed, trial_folder, plan=None, refusal=refusal)
    return Trial(name, changed, trial_folder, plan)
