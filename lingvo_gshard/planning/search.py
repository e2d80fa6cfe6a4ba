"""Alternatives to a request, each compiled: partitionings to rank, and changes that save memory.

The paper left the automatic choice of a partitioning to future work (section 6). Here XLA's own
compiler judges every candidate by the program it makes.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gshard.core import hyperparams, table
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.moe import group_size
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.planning import planner, report
from lingvo_gshard.planning.plan import Plan, Times
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, Mesh

# Each keeps less than the one before; NONE keeps everything.
_REMATS = {
    Remat.ALL_BUT_PRODUCTS: "all but large products computed again",
    Remat.BLOCK: "whole blocks computed again",
}
_STACKS = {"encoder": "source_len", "decoder": "target_len"}
# A description, and values of settings by path.
_Change = tuple[str, Mapping[str, object]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """An alternative and the plan of its training step, or the reason why there is none."""

    name: str
    request: Request
    folder: pathlib.Path
    plan: Plan | None
    refusal: str = ""

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


def plan_lines(request: Request, folder: pathlib.Path, save: bool = False) -> Iterator[str]:
    """Yields the plan as text, and if a training step does not fit, what would make it fit.

    With `save`, the trainer's executables are saved below `folder`, or ValueError is raised if a
    step does not fit.
    """
    made = planner.planned(request, folder)
    yield report.text(made)
    if not made.step.fits:
        yield "what would make it fit, each compiled (--search tries partitionings):"
        for trial in remedies(request, folder):
            changes = trial.request.settings[len(request.settings) :]
            yield f"  {trial} ({' '.join(f'--set={change}' for change in changes)})"
    if save and not made.step.fits:
        raise ValueError("--save: a step does not fit, so nothing was saved.")
    if save:
        yield planner.save_training(request, folder / "executables")


def search_lines(request: Request, folder: pathlib.Path) -> Iterator[str]:
    """Yields each candidate as soon as its step is planned, their ranking, the best's programs."""
    planner.check(request)
    moe = request.params.task.encoder.moe
    num_experts = None if moe is None else moe.num_experts
    trials = []
    for name, parts in candidates(num_experts, request.partitioning.num_partitions):
        trials.append(_trial(name, dataclasses.replace(request, partitioning=parts), folder))
        yield str(trials[-1])
    trials.sort(key=lambda trial: trial.secs.step)
    yield "\n" + ranking(trials)
    if trials[0].fits:
        yield "\n" + report.programs(planner.planned(trials[0].request, trials[0].folder))


def candidates(num_experts: int | None, cores: int) -> Iterator[tuple[str, Partitioning]]:
    """Yields by name the partitionings that are worth compiling; a dense model has no experts."""
    data: dict[str, Axis] = {"B": "d", "G": "d"}
    tables = {
        "data parallel only": data,
        "data parallel, all weights split over M (ZeRO)": {**data, "M": "d"},
        "data parallel, dense weights split over H": {**data, "H": "d"},
    }
    if num_experts is not None and num_experts % cores == 0:
        paper: dict[str, Axis] = {**data, "E": "d"}
        tables |= {
            "experts on the batch's axis (the paper's)": paper,
            "the paper's, dense weights split over H": {**paper, "H": "d"},
            "the paper's, dense weights split over M (ZeRO)": {**paper, "M": "d"},
        }
    for name, rows in tables.items():
        yield name, Partitioning.from_dict(Mesh.flat(cores), rows)
    both = ("data", "experts")
    for ways in (cores // 2, cores // 4, cores // 8):
        if num_experts is not None and 1 < ways < cores and num_experts % ways == 0:
            mesh = Mesh(both, (cores // ways, ways))
            split = Partitioning.from_dict(mesh, {"B": both, "G": both, "E": "experts"})
            yield f"experts x data, {ways} x {cores // ways}", split


def ranking(trials: Sequence[Trial]) -> str:
    """The partitionings that fit, in their order, the others, and why the first is chosen."""
    fitting = [trial for trial in trials if trial.fits]
    rows = [["partitioning", "GiB", "step ms", "compute", "memory", "network"]]
    for trial in fitting:
        assert trial.plan is not None
        secs, peak_gib = trial.secs, trial.plan.step.memory_gib.peak
        times = (secs.step, secs.compute, secs.memory, secs.network)
        rows.append([trial.name, f"{peak_gib:.2f}", *(f"{1e3 * each:.2f}" for each in times)])
    others = [str(trial) for trial in trials if not trial.fits]
    return "\n".join([table.text(rows), *others, f"chosen: {_choice(fitting)}"])


def remedies(request: Request, folder: pathlib.Path) -> Iterator[Trial]:
    """Plans each change that may save memory, in folders below `folder`.

    If none of them suffices alone, all that keep the batch are combined, then half of the batch
    with them, until one fits.
    """
    gentle, rows = list(_keeping_the_batch(request.params)), request.params.input.batch_size
    half = [] if rows % 2 else [("half as many tokens a core", {"input.batch_size": rows // 2})]
    helped = False
    for change in [*gentle, *half]:
        trial = _changed(request, change, folder)
        helped = helped or trial.fits
        yield trial
    for change in [] if helped else _combined(gentle, half):
        trial = _changed(request, change, folder)
        yield trial
        if trial.fits:
            return


def _trial(name: str, request: Request, folder: pathlib.Path) -> Trial:
    """Plans an alternative's training step in a folder of its own below `folder`."""
    folder = folder / re.sub(r"\W+", "_", name).strip("_")
    try:
        return Trial(name, request, folder, planner.planned(request.step_only(), folder))
    except ValueError as error:  # Mostly dims that the mesh does not divide.
        return Trial(name, request, folder, None, str(error).splitlines()[0])


def _changed(request: Request, change: _Change, folder: pathlib.Path) -> Trial:
    name, values = change
    settings = tuple(f"{path}={value}" for path, value in values.items())
    params = request.params.Copy()
    for setting in settings:
        hyperparams.apply_setting(params, setting)
    asked = dataclasses.replace(request, params=params, settings=request.settings + settings)
    return _trial(name, asked, folder)


def _choice(fitting: Sequence[Trial]) -> str:
    """The first partitioning, and how much it gains over the second."""
    if not fitting:
        return "none, for none fits."
    if len(fitting) == 1:
        return f"{fitting[0].name}, the only one that fits."
    best, second = fitting[0].secs, fitting[1].secs
    parts = ("memory", "network", "compute")
    most = max(parts, key=lambda part: getattr(second, part) - getattr(best, part))
    gain = getattr(second, most) - getattr(best, most)
    return (
        f"{fitting[0].name}: {second.step / best.step:.2f} times as fast as {fitting[1].name} at "
        f"the roofline, most of it {most} time ({1e3 * gain:.2f} ms less)."
    )


def _keeping_the_batch(params: Params) -> Iterator[_Change]:
    """Yields the changes that the experiment has not made yet, the cheapest first."""
    saving = [Remat.NONE, *_REMATS]
    for remat, name in _REMATS.items():
        paths = (f"task.{stack}.remat" for stack in _STACKS)
        wasteful = [path for path in paths if saving.index(params.Get(path)) < saving.index(remat)]
        if wasteful:
            yield name, dict.fromkeys(wasteful, remat.name)
    if params.task.activation_dtype != "bfloat16":
        yield "activations in bfloat16", {"task.activation_dtype": "bfloat16"}
    halves = {}
    for stack, length in _STACKS.items():
        if (moe := params.task.Get(stack).moe) is not None:
            tokens = params.input.batch_size * params.input.Get(length)
            halves[f"task.{stack}.moe.group_size"] = group_size(moe, tokens) // 2
    if halves and min(halves.values()) > 0:
        yield "groups of half as many tokens", halves


def _combined(gentle: Sequence[_Change], half: Sequence[_Change]) -> Iterator[_Change]:
    """Yields all changes that keep the batch as one, then with half of the batch as well."""
    kept = [
        (name, values)
        for i, (name, values) in enumerate(gentle)
        if not any(values.keys() <= later.keys() for _, later in gentle[i + 1 :])
    ]
    for changes in [kept, [*kept, *half]] if half else [kept]:
        if len(changes) > 1:
            joined = {path: value for _, values in changes for path, value in values.items()}
            yield ", ".join(name for name, _ in changes), joined
