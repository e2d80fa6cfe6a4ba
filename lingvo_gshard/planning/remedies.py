"""A plan as text, and changes that save memory where it does not fit, each compiled."""

import functools
import itertools
import pathlib
from collections.abc import Iterator

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
        if save:
            raise ValueError("--save: nothing was saved, as a step does not fit into memory.")
    elif save:
        save_training = functools.partial(planner.save_training, folder=folder / "executables")
        yield planner.in_own_process(save_training, request)


def remedies(request: Request, folder: pathlib.Path) -> Iterator[Trial]:
    """Plans each change that may save memory, in folders below `folder`.

    If none suffices, all that keep the batch are combined, then half of the batch with them.
    """
    gentle, rows = _keeping_the_batch(request.params), request.params.input.batch_size
    half = {} if rows % 2 else {"half as many tokens a core": [f"input.batch_size={rows // 2}"]}
    helped = False
    for name, settings in (gentle | half).items():
        trial = tried(request, settings, folder, name)
        helped = helped or trial.fits
        yield trial
    gentle.pop(_REMATS[Remat.ALL_BUT_PRODUCTS], None)  # Computing whole blocks again saves more.
    for changes in (gentle, gentle | half) if half else (gentle,):
        if len(changes) > 1 and not helped:
            settings = list(itertools.chain(*changes.values()))
            trial = tried(request, settings, folder, ", ".join(changes))
            helped = trial.fits
            yield trial


def _keeping_the_batch(params: Params) -> dict[str, list[str]]:
    """The settings of each change that the experiment has not made yet, the cheapest first."""
    changes, saving = dict[str, list[str]](), [Remat.NONE, *_REMATS]
    stacks = {stack: params.task.Get(stack) for stack in placement.STACKS}
    for remat, name in _REMATS.items():
        wasteful = [s for s, p in stacks.items() if saving.index(p.remat) < saving.index(remat)]
        changes[name] = [f"task.{stack}.remat={remat.name}" for stack in wasteful]
    if params.task.activation_dtype != "bfloat16":
        changes["activations in bfloat16"] = ["task.activation_dtype=bfloat16"]
    halves = {}
    for stack, length in placement.STACKS.items():
        if (moe := stacks[stack].moe) is not None:
            rows = params.input.batch_size // max(1, stacks[stack].microbatches)
            tokens = rows * params.input.Get(length)
            halves[stack] = group_size(moe, tokens) // 2
    if 0 not in halves.values():
        changes["groups of half as many tokens"] = [
            f"task.{stack}.moe.group_size={size}" for stack, size in halves.items()
        ]
    return {name: settings for name, settings in changes.items() if settings}
