"""Table 3 and Figures 7 and 8: plans of the paper's models beside its figures; see docs/paper.md.

The plans have Table 3's rates and costs, Figure 7's memory and Figure 8's times by category. This
module adds the growth of these times per token (section 5.2), and both readings of Table 3's
batches.

A batch of "1M tokens" may be 2^20 source and as many target tokens, or half as many of each. The
experiments take the first reading, because footnote 7 counts source tokens. The second reading is
the same training step on half of the rows; its 10^12 tokens count both sides.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from lingvo_gshard.layers import moe_sizes
from lingvo_gshard.plans import kept_plans
from lingvo_gshard.plans.categories import Category
from lingvo_gshard.plans.plan import Plan
from lingvo_gshard.plans.request import Ask, Request
from repro.tables import as_printed
from repro.tables.as_printed import PaperRun
from xla_plan.machines import topology
from xla_plan.plans import plan_folder

_GENERATION = "v3"
HALF = "half"  # The subfolder for plans of half of the rows, in the family's folder.


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A row of Table 3, and our plans for it."""

    run: PaperRun
    plan: Plan
    half: Plan | None = None  # The plan of its training step on half of the rows, if made.


@dataclasses.dataclass(frozen=True)
class TokenTimes:
    """The roofline time of a training step per target token of a core, as in section 5.2."""

    step_secs: float
    all_to_all_secs: float
    all_to_all_share: float  # The share of the layers' time, without optimizer and vocabulary.


def plan_family(
    ask: Ask,
    folder: pathlib.Path,
    both_readings: bool,
    progress: Callable[[PlannedRun], None],
) -> list[PlannedRun]:
    """Plans the family in separate folders; calls `progress` with each model once it is planned.

    `both_readings` also plans the training steps on half of the rows.
    """
    family = []
    for run in as_printed.FAMILY:
        request = ask(run.model, topology.tpu(_GENERATION, run.cores))
        planned = PlannedRun(run, kept_plans.load_or_make(request, model_folder(folder, run.model)))
        if both_readings:
            half_folder = model_folder(folder / HALF, run.model)
            half = kept_plans.load_or_make(half_batch(request), half_folder)
            planned = dataclasses.replace(planned, half=half)
        progress(planned)
        family.append(planned)
    return family


def load_family(folder: pathlib.Path) -> list[PlannedRun]:
    """Returns the plans that are stored in `folder`, even if older code made them.

    Models without a plan are left out. Raises ValueError if the folder contains no plan, or if one
    is damaged, outdated or of another model.
    """
    runs = (*as_printed.FAMILY, as_printed.DENSE)
    family = []
    for run in runs:
        made = load(folder, run.model)
        if made is not None:
            family.append(PlannedRun(run, made, load(folder / HALF, run.model)))

    if not family:
        raise ValueError(
            f"{folder}: no plan of {runs[0].model} or another of the paper's models there; "
            f"`plan_tables --table=scaling --out={folder}` makes them."
        )
    return family


def load(folder: pathlib.Path, model: str) -> Plan | None:
    """Returns the stored plan of a model in a family's folder, or None before it is made.

    Raises ValueError if it is damaged, outdated or of another model.
    """
    kept_folder = model_folder(folder, model)
    kept = plan_folder.find(Plan, kept_folder)
    if kept is not None and kept.model != model:
        raise ValueError(f"{kept_folder}: expected a plan of {model}, got one of {kept.model}.")
    return kept


def half_batch(request: Request) -> Request:
    """Returns the request for the training step alone, on half of the rows.

    Groups become one group per core, as in Algorithm 2, if they have more tokens than a core then
    has.
    """
    params = request.params
    rows = params.input.batch_size // 2
    cores = request.partitioning.mesh.num_partitions

    settings = [f"input.batch_size={rows}"]
    for stack, length in params.task.cls.STACKS.items():
        stack_moe = params.task.Get(stack).moe
        if stack_moe is None:
            continue
        tokens = rows * params.input.Get(length)
        if moe_sizes.group_size(stack_moe, tokens) > tokens // cores:
            settings.append(f"task.{stack}.moe.group_size={tokens // cores}")
    return request.step_only().changed(settings)


def half_core_years(half: Plan) -> float:
    """Returns the core-years of 10^12 tokens of both sides, given a plan of half of the rows."""
    batch = half.step.batch
    assert batch is not None
    return half.core_years() * batch.target_len / (batch.source_len + batch.target_len)


def faster_than_ours(family: Sequence[PlannedRun], half: bool) -> dict[str, float]:
    """Returns the paper's steps per second over ours, by model, if they exceed ours.

    `half` chooses the second reading, half of the rows.
    """
    ratios = {}
    for planned in family:
        ratio = ratio_to_ours(planned.run, planned.half if half else planned.plan)
        if ratio is not None and ratio > 1.0:
            ratios[planned.run.name] = ratio
    return ratios


def ratio_to_ours(run: PaperRun, made: Plan | None) -> float | None:
    """Returns the paper's steps per second over a plan's; None if either is unknown."""
    if run.steps_per_sec is None or made is None or made.step.cost is None:
        return None
    return run.steps_per_sec / made.steps_per_sec()


def token_times(made: Plan) -> TokenTimes | None:
    """Returns the times whose growth section 5.2 measures; None if a step does not fit."""
    cost = made.step.cost
    if cost is None:
        return None

    # The paper measured a pass through the layers, without optimizer and vocabulary.
    outside_secs = 0.0
    for category in (Category.OPTIMIZER, Category.SOFTMAX):
        if category in cost.roofline_secs_by_category:
            outside_secs += cost.roofline_secs_by_category[category].step
    layers_secs = cost.step_secs - outside_secs

    # A dense model has no AllToAll.
    exchange_secs = cost.network_secs_by_kind.get("all-to-all", 0.0)
    return TokenTimes(
        step_secs=cost.step_secs / made.tokens_per_core,
        all_to_all_secs=exchange_secs / made.tokens_per_core,
        all_to_all_share=exchange_secs / layers_secs,
    )


def model_folder(folder: pathlib.Path, model: str) -> pathlib.Path:
    """Returns a model's folder, for example FAMILY/MoE128E12L for m4.MoE128E12L."""
    return folder / model.partition(".")[2]
