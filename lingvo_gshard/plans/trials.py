"""Trials: alternatives to a request, each with the plan of its training step."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from lingvo_gshard.plans import kept_plans
from lingvo_gshard.plans.request import Request
from xla_plan.searches import trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(trials.Trial):
    """An alternative to a request, and the plan of its training step."""

    request: Request
    folder: pathlib.Path


def compile_trial(
    request: Request,
    settings: Sequence[str],
    folder: pathlib.Path,
    name: str = "",
    estimated_secs: float | None = None,
) -> Trial:
    """Plans a step with more settings, in its own folder in `folder`.

    By default, the trial's name is its settings.
    """
    # The name of the folder is one that every file system takes.
    name = name or " ".join(settings)
    changed = request.changed(settings)
    trial_folder = folder / re.sub(r"\W+", "_", name).strip("_")

    step = None
    refusal = ""
    try:
        step = kept_plans.load_or_make(changed.step_only(), trial_folder).step
    except ValueError as error:  # Usually, the mesh does not divide a dim.
        refusal = str(error).splitlines()[0]
    return Trial(
        name=name,
        plan=step,
        refusal=refusal,
        estimated_secs=estimated_secs,
        request=changed,
        folder=trial_folder,
    )
