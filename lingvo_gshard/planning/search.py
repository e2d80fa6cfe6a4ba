"""The search for a partitioning: candidate tables of dims and meshes, compiled and ranked.

The paper left the automatic choice to future work (section 6); here XLA's own compiler judges
every candidate by what it made of the program.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from lingvo_gshard.planning import plan_store
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.sharding.mesh import Axis, Mesh

_LINE = "{:<50} {:>10} {:>10} {:>10} {:>10} {:>10}".format
HEAD = _LINE("partitioning", "GiB", "step ms", "compute", "memory", "network")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A mesh, and a table from letters of dims to its axes."""

    name: str
    mesh: Mesh
    table: dict[str, Axis]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A candidate with its plan, or with why it has none."""

    candidate: Candidate
    plan: Plan | None
    refusal: str = ""

    @property
    def step_secs(self) -> float:
        """At the roofline; infinite where it can't run."""
        fits = self.plan is not None and self.plan.cost is not None
        return self.plan.cost.roofline_secs.step if fits else float("inf")  # type: ignore[union-attr]


def candidates(num_experts: int | None, cores: int) -> Iterator[Candidate]:
    """Partitionings worth a compilation for a model of so many experts, None for a dense one."""
    flat = Mesh.flat(cores)
    rows: dict[str, Axis] = {"B": "d", "G": "d"}
    yield Candidate("data parallel only", flat, rows)
    yield Candidate("data parallel, all weights split over M (ZeRO)", flat, {**rows, "M": "d"})
    yield Candidate("data parallel, dense weights split over H", flat, {**rows, "H": "d"})
    if num_experts is None:
        return
    if num_experts % cores == 0:
        paper: dict[str, Axis] = {**rows, "E": "d"}
        yield Candidate("experts on the batch's axis (the paper's)", flat, paper)
        yield Candidate("the paper's, dense weights split over H", flat, {**paper, "H": "d"})
        yield Candidate("the paper's, dense weights split over M (ZeRO)", flat, {**paper, "M": "d"})
    for ways in (cores // 2, cores // 4, cores // 8):
        if 1 < ways < cores and num_experts % ways == 0:
            mesh = Mesh(("data", "experts"), (cores // ways, ways))
            both = ("data", "experts")
            table: dict[str, Axis] = {"B": both, "G": both, "E": "experts"}
            yield Candidate(f"experts x data, {ways} x {cores // ways}", mesh, table)


def search(request: Request, tried: Iterable[Candidate], folder: pathlib.Path) -> Iterator[Judged]:
    """Plans each candidate, kept in a folder of its own, one after the other."""
    for candidate in tried:
        asked = dataclasses.replace(
            request, mesh=candidate.mesh, table=tuple(sorted(candidate.table.items()))
        )
        name = re.sub(r"\W+", "_", candidate.name).strip("_")
        try:
            yield Judged(candidate, plan_store.planned(asked, folder / name))
        except ValueError as error:  # Dims that the mesh does not divide, most of all.
            yield Judged(candidate, None, str(error).splitlines()[0])


def table(judged: Sequence[Judged]) -> str:
    """The ranking, the fastest that fits first, and why that was chosen."""
    ranked = sorted(judged, key=lambda each: each.step_secs)
    return "\n".join([HEAD, *map(line, ranked), _reason(ranked)])


def line(judged: Judged) -> str:
    """A candidate's line, below HEAD."""
    name, plan = judged.candidate.name, judged.plan
    if plan is None:
        return f"{name:<50} refused: {judged.refusal}"
    peak = f"{plan.memory_gib.peak:.2f}"
    if plan.cost is None:
        unknown = _LINE(name, peak, "-", "-", "-", "-")
        return f"{unknown}  does not fit in {plan.memory_gib.capacity:.2f}"
    secs = plan.cost.roofline_secs
    cells = (secs.step, secs.compute, secs.memory, secs.network)
    return _LINE(name, peak, *(f"{1e3 * each:.2f}" for each in cells))


def _reason(judged: Sequence[Judged]) -> str:
    fitting = [each for each in judged if each.plan is not None and each.plan.cost is not None]
    if not fitting:
        return "chosen: none, for none fits."
    best, *others = fitting
    reason = f"chosen: {best.candidate.name}"
    if not others:
        return f"{reason}, the only one that fits."
    first, second = (each.plan.cost.roofline_secs for each in (best, others[0]))  # type: ignore[union-attr]
    gains = {part: getattr(second, part) - getattr(first, part) for part in ("memory", "network")}
    gains["compute"] = second.compute - first.compute
    most = max(gains, key=lambda part: gains[part])
    return (
        f"{reason}: {second.step / first.step:.2f} times as fast as {others[0].candidate.name} at "
        f"the roofline, most of it {most} time ({1e3 * gains[most]:.2f} ms less)."
    )
