"""Searches for the mesh and the table with which an experiment trains fastest on a topology.

The paper left the automatic choice of a partitioning to future work (section 6). Here candidates
are generated and ranked by a cost model; XLA's own compiler judges the best few.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_gshard.files import table
from lingvo_gshard.planning import planner, report
from lingvo_gshard.planning.candidates import candidates
from lingvo_gshard.planning.plan import Plan, Times
from lingvo_gshard.planning.planner import Request

_COMPILED = 6  # How many candidates are compiled.


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
        """The times of a step at the roofline; an infinite step if it cannot run."""
        cost = self.plan.step.cost if self.plan else None
        return cost.roofline_secs if cost else Times(step=float("inf"))

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.step.fits

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.name}: refused: {self.refusal}"
        memory = self.plan.step.memory_gib
        if not self.fits:
            return f"{self.name}: does not fit, {memory.peak:.2f} of {memory.capacity:.2f} GiB"
        return f"{self.name}: fits, {memory.peak:.2f} GiB, {1e3 * self.secs.step:.2f} ms a step"


def tried(request: Request, settings: Sequence[str], folder: pathlib.Path, name: str = "") -> Trial:
    """Plans a step with more settings, by default its name, in a folder of its own in `folder`."""
    name, changed = name or " ".join(settings), request.changed(settings)
    folder = folder / re.sub(r"\W+", "_", name).strip("_")
    plan, refusal = None, ""
    try:
        plan = planner.planned(changed.step_only(), folder)
    except ValueError as error:  # Mostly dims that the mesh does not divide.
        refusal = str(error).splitlines()[0]
    return Trial(name, changed, folder, plan, refusal)


def search_lines(request: Request, folder: pathlib.Path) -> Iterator[str]:
    """Yields each candidate as soon as it is compiled, their ranking, the best's programs."""
    found, trials, fitting = candidates(request), list[Trial](), set[tuple[str, ...]]()
    yield f"{len(found)} candidates fit by the cost model; its best ones, compiled:"
    for each in found:
        layout = each.settings[:2]  # Mesh and table: of each, only one that fits is compiled.
        if len(trials) < _COMPILED and layout not in fitting:
            trial = tried(request, each.settings, folder)
            fitting |= {layout} if trial.fits else set()
            trials.append(dataclasses.replace(trial, estimated_secs=each.secs))
            yield str(trial)
    trials.sort(key=lambda trial: trial.secs.step)
    yield "\n" + ranking(trials)
    if trials[0].fits:
        yield "to train so: " + " ".join(f"--set={each}" for each in trials[0].request.settings)
        yield "\n" + report.programs(planner.planned(trials[0].request, trials[0].folder))


def ranking(trials: Sequence[Trial]) -> str:
    """The partitionings that fit, in their order, the others, and why the first is chosen."""
    fitting = [trial for trial in trials if trial.fits]
    rows = [["partitioning", "GiB", "step ms", "compute", "memory", "network", "estimated ms"]]
    for trial in fitting:
        assert trial.plan is not None
        secs, peak_gib = trial.secs, trial.plan.step.memory_gib.peak
        times = (secs.step, secs.compute, secs.memory, secs.network, trial.estimated_secs)
        rows.append([trial.name, f"{peak_gib:.2f}", *(f"{1e3 * each:.2f}" for each in times)])
    lines = [table.text(rows), *(str(trial) for trial in trials if not trial.fits)]
    if len(fitting) > 1:
        lines.append(agreement([(trial.estimated_secs, trial.secs.step) for trial in fitting]))
    return "\n".join([*lines, f"chosen: {_choice(fitting)}"])


def agreement(steps: Sequence[tuple[float, float]]) -> str:
    """How well the cost model's steps, first in each pair, predict the compiled ones."""
    pairs = np.array(steps)
    ranks, ratios = pairs.argsort(0).argsort(0), pairs[:, 0] / pairs[:, 1]
    correlation = np.asarray(np.corrcoef(ranks.T))[0, 1]
    return (
        f"the cost model's steps: {ratios.min():.2f} to {ratios.max():.2f} of the compiled ones, "
        f"rank correlation {correlation:.2f} over {len(pairs)} candidates"
    )


def _choice(fitting: Sequence[Trial]) -> str:
    """The first partitioning, and how much it gains over the second."""
    if not fitting:
        return "none, for none fits."
    if len(fitting) == 1:
        return f"{fitting[0].name}, the only one that fits."
    best, second = fitting[0].secs, fitting[1].secs
    parts = ("memory", "network", "compute")
    gains = {part: getattr(second, part) - getattr(best, part) for part in parts}
    most = max(parts, key=gains.__getitem__)
    return (
        f"{fitting[0].name}: {second.step / best.step:.2f} times as fast as {fitting[1].name} at "
        f"the roofline, most of it {most} time ({1e3 * gains[most]:.2f} ms less)."
    )
