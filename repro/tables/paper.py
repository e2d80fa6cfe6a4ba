"""The paper's Figure 1 and Tables 1 to 3 with ours beside them, without a compiler.

Weights, experts and flops follow from the registered experiments. Our rates and costs come from
stored plans, if any.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from lingvo_gshard import registry
from lingvo_gshard.core.late import figure as mpl_figure
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import flops
from lingvo_gshard.plans.plan import SECS_PER_YEAR, TRAINING_TOKENS, Plan
from lingvo_gshard.runs import loss_products
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from repro.tables import as_printed, family, figure9
from repro.tables.as_printed import PaperRun
from repro.tables.family import PlannedRun
from xla_plan.machines import hardware
from xla_spmd.mesh import Mesh

_SECS_PER_DAY = 24 * 3600
_DOTS_PER_INCH = 130


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """The figures that follow from a registered experiment by formula."""

    weights: int
    # The operations of a training step's products, without capacity, dispatch and recomputation;
    # see model/flops.py.
    step_flops: float
    remat: Remat  # The results that both stacks recompute.


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of the paper, our experiment, and its stored plans, if any."""

    run: PaperRun
    own: OwnModel
    planned: PlannedRun | None

    @property
    def days(self) -> float | None:
        """The days of 10^12 tokens at Table 3's rate and batch."""
        if self.run.steps_per_sec is None:
            return None
        return self._secs(self.run.steps_per_sec) / _SECS_PER_DAY

    @property
    def core_years(self) -> float | None:
        """The core-years of 10^12 tokens at Table 3's rate and batch."""
        if self.run.steps_per_sec is None:
            return None
        return self.run.cores * self._secs(self.run.steps_per_sec) / SECS_PER_YEAR

    def share_of_peak(self, half: bool) -> float | None:
        """Returns the share of the cores' peak rate that our products would need at Table 3's rate.

        `half` chooses the second reading of Table 3's batches.
        """
        if self.run.steps_per_sec is None:
            return None
        step_flops = self.own.step_flops / 2 if half else self.own.step_flops
        peak_flops = hardware.GENERATIONS[figure9.GENERATION].peak_flops
        return step_flops * self.run.steps_per_sec / (self.run.cores * peak_flops)

    def _secs(self, steps_per_sec: float) -> float:
        return TRAINING_TOKENS / self.run.batch_tokens / steps_per_sec


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """The share of a step that recomputes activations (section 5.1), printed and planned."""

    model: str
    layers: int
    printed: float | None  # The printed share of the cycles.
    own: OwnModel
    plan: Plan | None


def rows(folder: pathlib.Path | None) -> list[Row]:
    """Returns all models of Tables 1 and 3, with the plans stored in a family's folder, if any.

    Raises ValueError if the folder contains no plan, or if one is damaged, outdated or of another
    model.
    """
    family_plans = [] if folder is None else family.load_family(folder)
    planned = {model.run: model for model in family_plans}
    runs = (*as_printed.FAMILY, as_printed.DENSE)
    return [Row(run, own_model(run.model), planned.get(run)) for run in runs]


def recomputed(folder: pathlib.Path | None) -> list[Recomputed]:
    """Returns the shares of all mixtures of experts, including models of 24 layers."""
    models = [run.model for run in as_printed.FAMILY]
    shares = []
    for model in (*models, *as_printed.MODELS_OF_24_LAYERS):
        params = registry.get_params(model)
        layers = params.task.encoder.num_layers + params.task.decoder.num_layers
        printed = as_printed.RECOMPUTED_SHARES.get(layers)
        made = None if folder is None else family.load(folder, model)
        shares.append(Recomputed(model, layers, printed, own_model(model), made))
    return sorted(shares, key=lambda share: share.layers)


@functools.cache
def own_model(model: str) -> OwnModel:
    """Returns a registered experiment's figures, for vocabularies of known sizes."""
    params = registry.get_params(model)
    task = params.task.Instantiate(Annotator(Partitioning(Mesh.flat(1), ())))
    return OwnModel(
        weights=task.num_weights,
        step_flops=flops.step_flops(loss_products.of_experiment(params)),
        remat=params.task.encoder.remat,
    )


def draw_figure_1(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Draws the quality and the cost of the paper's models by their weights, and our plans' cost.

    Both axes of the cost are logarithmic.
    """
    figure = mpl_figure.Figure(figsize=(11.0, 4.5), layout="constrained")
    quality, cost = figure.subplots(1, 2)

    # The paper's models; MoE(2048E, 60L) lacks both quality and cost.
    printed = [row for row in rows if row.run.delta_bleu is not None]
    for row in printed:
        for axes, value in ((quality, row.run.delta_bleu), (cost, row.run.core_years)):
            at = (row.run.weights / 1e9, value)
            label = "the paper" if row is printed[0] else None
            axes.scatter(*at, color="tab:blue", label=label)
            axes.annotate(row.run.name, at, (4, 4), "data", "offset points", fontsize=7)

    # Our plans, which are estimates at the roofline.
    planned = [row for row in printed if row.planned is not None and row.planned.plan.step.fits]
    if planned:
        years = [row.planned.plan.core_years() for row in planned if row.planned is not None]
        own_weights = [row.own.weights / 1e9 for row in planned]
        cost.scatter(
            own_weights, years, color="tab:orange", marker="x", label="planned, at the roofline"
        )

    baselines = f"{as_printed.NUM_BASELINES} bilingual baselines"
    cost.axhline(as_printed.BASELINES_CORE_YEARS, linestyle="--", linewidth=1, label=baselines)
    quality.axhline(0.0, linestyle="--", linewidth=1)

    # This leaves room for the names beside the points.
    weights_axis = {"xscale": "log", "xlim": (1.0, 3000.0), "xlabel": "weights, 10^9"}
    quality.set(**weights_axis, ylabel="delta BLEU over the baselines")
    cost.set(**weights_axis, yscale="log", ylabel="TPU v3 core-years")
    cost.legend(fontsize=7)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
