"""Figures 7 and 8 of plans: the memory of a core in training, and the parts of a step's time.

A bar of memory ends at the peak, so it shows only the temporaries that are held beside the state at
that moment. A dashed line marks the capacity. Times are at the roofline, by category.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np

from lingvo_gshard.core.late import figure as mpl_figure
from lingvo_gshard.plans import plan_text
from lingvo_gshard.plans.categories import Category, label
from lingvo_gshard.plans.plan import Plan
from xla_plan.cost.memory import Memory
from xla_plan.cost.step_cost import StepCost

_DOTS_PER_INCH = 130


def draw_step(plan: Plan, folder: pathlib.Path) -> None:
    """Draws into `folder` the pictures of a plan's report."""
    plans = {plan.model: plan}
    draw(plans, folder / plan_text.MEMORY_PICTURE, folder / plan_text.TIME_PICTURE)


def draw(plans: Mapping[str, Plan], memory_path: pathlib.Path, time_path: pathlib.Path) -> None:
    """Draws a bar of memory for each plan by name, and bars of times if any step fits."""
    # Figure 7. Plans for one kind of machine share a capacity, and so a line.
    device = plan_text.device(next(iter(plans.values())))
    memories = {name: plan.step.memory_gib for name, plan in plans.items()}
    bars = {name: _memory_parts(memory) for name, memory in memories.items()}
    figure = _stacked(bars, f"GiB a {device}")
    for capacity in {memory.capacity for memory in memories.values()}:
        figure.axes[0].axhline(capacity, color="black", linestyle="--", linewidth=1)
    figure.savefig(memory_path, dpi=_DOTS_PER_INCH)

    # Figure 8 for the plans that have times.
    bars = {}
    for name, plan in plans.items():
        if plan.step.cost is not None:
            bars[name] = _time_parts(plan.step.cost)
    if bars:
        figure = _stacked(bars, "ms a step at the roofline")
        figure.savefig(time_path, dpi=_DOTS_PER_INCH)


def _memory_parts(memory: Memory) -> dict[str, float]:
    """Returns the GiB of Figure 7's parts, from the bottom of a bar."""
    parts = {name: role.gib for name, role in memory.roles.items()}
    parts["temporaries"] = max(memory.peak - sum(parts.values()), 0.0)
    return parts


def _time_parts(cost: StepCost) -> dict[str, float]:
    """Returns the milliseconds of Figure 8's parts: a core's own by category, then the network."""
    # All bars need the same parts, so a category without instructions is 0.
    parts = dict.fromkeys((label(name) for name in Category), 0.0)
    for name, secs in cost.roofline_secs_by_category.items():
        parts[label(name)] = 1e3 * (secs.step - secs.network)
    parts["collectives"] = 1e3 * cost.roofline_secs.network
    return parts


def _stacked(bars: Mapping[str, Mapping[str, float]], label: str) -> mpl_figure.Figure:
    """Returns a drawing of bars by name; all have the same parts, the first at the bottom."""
    figure = mpl_figure.Figure(figsize=(2.5 + 1.2 * len(bars), 4.5), layout="constrained")
    axes = figure.subplots()

    # Each part is drawn for all bars at once, on top of the parts before.
    bottom = np.zeros(len(bars))
    for part in next(iter(bars.values())):
        heights = [bar[part] for bar in bars.values()]
        axes.bar(list(bars), heights, bottom=bottom, label=part)
        bottom += heights

    # Names are long, so they are rotated, and the legend is placed beside the bars.
    axes.set_ylabel(label)
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
