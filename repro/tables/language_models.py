"""Plans of language models beside their published rates: Lingvo's models, and GLaM.

A rate at the roofline is a bound. The share of the bound that a published rate reaches shows how
near the real run came, and whether a plan can be trusted: shares far apart, or above 1, are errors
of a plan. One error is known: among the collectives that run beside products, a plan finds only the
ones that the schedule starts and ends separately, which are a fifth of GLaM's network time on v4.

Lingvo's figures are comments in lingvo/tasks/lm/params/synthetic_packed_input.py at commit
e0be5dc4. They are undated and have two to four digits. GLaM's figures are from Du et al. (2021).
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from lingvo_gshard.plans import kept_plans
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.plans.request import Ask
from repro.tables import family


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A registered experiment, the machine for which a rate was published, and the rate."""

    model: str
    topology: str
    weights: float
    tokens_per_sec: float | None = None  # None if the source does not state it.

    @property
    def name(self) -> str:
        """The model's name without its module's name."""
        return self.model.partition(".")[2]


# Lingvo states that a layer of the wide models has 1.6875 B weights, in units of 2^30, and names
# the models after the sum over their layers, without the embedding.
_WIDE_LAYER = 1.6875 * 2**30
_GLAM_TOKENS_PER_SEC = 280e9 / (574 * 3600)

PUBLISHED = (
    PublishedRun("lm.DenseLm8B2x2", "v3:2x2", 8 * 2**30),
    PublishedRun("lm.DenseLm128B8x8", "v3:8x8", 137_702_416_384, 3.7e3),
    PublishedRun("lm.DenseLm128B16x16", "v3:16x16", 137_702_416_384, 18e3),
    PublishedRun("lm.DenseLm128B32x32", "v3:32x32", 137_702_416_384, 62e3),
    PublishedRun("lm.DenseLm175B32x32", "v3:32x32", 174_366_928_896, 51.53e3),
    PublishedRun("lm.DenseLm1T16x16", "v3:16x16", 1_100_041_175_040, 1.4e3),
    PublishedRun("lm.DenseLm12kWide41BAdam8x8", "v3:8x8", 24 * _WIDE_LAYER, 17.4e3),
    PublishedRun("lm.DenseLm12kWide41BAdam16x16", "v3:16x16", 24 * _WIDE_LAYER, 53.8e3),
    PublishedRun("lm.DenseLm12kWide162BAdam16x16", "v3:16x16", 96 * _WIDE_LAYER, 12.5e3),
    PublishedRun("lm.GLaM64B64E", "v4:8x8x16", 1.2e12, _GLAM_TOKENS_PER_SEC),
)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A published run, and our plan for it."""

    run: PublishedRun
    plan: Plan

    @property
    def share(self) -> float | None:
        """The published rate over the plan's, which is at the roofline; None without both."""
        bound = self.plan.tokens_per_sec()
        if self.run.tokens_per_sec is None or bound == 0:
            return None
        return self.run.tokens_per_sec / bound


def plan_all(
    ask: Ask, folder: pathlib.Path, progress: Callable[[PlannedRun], None]
) -> list[PlannedRun]:
    """Plans the training steps of all models, and calls `progress` with each one once planned.

    Each plan has a subfolder of `folder`. Raises ValueError if a stored plan is damaged.
    """
    planned = []
    for run in PUBLISHED:
        request = ask(run.model, run.topology).step_only()
        made = kept_plans.load_or_make(request, family.model_folder(folder, run.model))
        planned.append(PlannedRun(run, made))
        progress(planned[-1])
    return planned


def load_all(folder: pathlib.Path) -> list[PlannedRun]:
    """Returns the plans that are stored in `folder`, even if older code made them.

    Models without a plan are left out. Raises ValueError if the folder contains no plan, or if one
    is damaged, outdated or of another model.
    """
    planned = []
    for run in PUBLISHED:
        kept = family.load(folder, run.model)
        if kept is not None:
            planned.append(PlannedRun(run, kept))

    if not planned:
        raise ValueError(
            f"{folder}: no plan of {PUBLISHED[0].model} or another published language model "
            f"there; `plan_tables --table=lm --out={folder}` makes them."
        )
    return planned


def shares(planned: Sequence[PlannedRun], module: str) -> list[float]:
    """Returns all known shares of the bound, for models whose names begin with `module`."""
    known = [run.share for run in planned if run.run.model.startswith(module)]
    return sorted(share for share in known if share is not None)
