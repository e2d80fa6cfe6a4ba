"""A plan as text, and changes that save memory where it does not fit, each compiled."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.moe import group_size
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.model import placement
from lingvo_gshard.planning import planner, report
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.planning.search import Trial, tried

# Each keeps less than the one before; NONE keeps everything.
_REMATS = {
    Remat.ALL_BUT_PRODUCTS: "all but large products computed again",
    Remat.BLOCK: "whole blocks computed again",
}
# A description, and values of settings by path.
_Change = tuple[str, Mapping[str, object]]


def plan_lines(request: Request, folder: pathlib.Path, save: bool = False) -> Iterator[str]:
    """Yields the plan as text, and if a training step does not fit, what would make it fit.

    `save` saves the trainer's executables below `folder`; ValueError if a step does not fit.
    """
    made = planner.planned(request, folder)
    yield report.text(made)
    if not made.step.fits:
        yield "what would make it fit, each compiled (--search tries partitionings):"
        for trial in remedies(request, folder):
            changes = trial.request.settings[len(request.settings) :]
            yield f"  {trial} ({' '.join(f'--set={change}' for change in changes)})"
    if save and not made.step.fits:
        raise ValueError("--save: nothing was saved, as a step does not fit into memory.")
    if save:
        yield planner.save_training(request, folder / "executables")


def remedies(request: Request, folder: pathlib.Path) -> Iterator[Trial]:
    """Plans each change that may save memory, in folders below `folder`.

    If none suffices, all that keep the batch are combined, then half of the batch with them.
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


def _changed(request: Request, change: _Change, folder: pathlib.Path) -> Trial:
    name, values = change
    settings = [f"{path}={value}" for path, value in values.items()]
    return tried(name, request.changed(settings), folder)


def _keeping_the_batch(params: Params) -> Iterator[_Change]:
    """Yields the changes that the experiment has not made yet, the cheapest first."""
    saving = [Remat.NONE, *_REMATS]
    for remat, name in _REMATS.items():
        paths = (f"task.{stack}.remat" for stack in placement.STACKS)
        wasteful = [path for path in paths if saving.index(params.Get(path)) < saving.index(remat)]
        if wasteful:
            yield name, dict.fromkeys(wasteful, remat.name)
    if params.task.activation_dtype != "bfloat16":
        yield "activations in bfloat16", {"task.activation_dtype": "bfloat16"}
    halves = {}
    for stack, length in placement.STACKS.items():
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
