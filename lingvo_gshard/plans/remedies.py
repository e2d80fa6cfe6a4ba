"""Changes that save memory for a training step that does not fit; each change is compiled."""

import itertools
import pathlib
from collections.abc import Iterator

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.moe_sizes import group_size, train_places
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.plans import trials
from lingvo_gshard.plans.request import Request
from lingvo_gshard.plans.trials import Trial

_REMAT_NAMES = {
    Remat.ALL_BUT_PRODUCTS: "all but large products computed again",
    Remat.BLOCK: "whole blocks computed again",
}

_Changes = dict[str, list[str]]  # Settings by the name of the change.


def trials_of(request: Request, folder: pathlib.Path) -> Iterator[Trial]:
    """Plans each change that may save memory, in folders below `folder`; yields each trial.

    If no single change suffices, all changes that keep the batch are combined, and then they are
    combined with half of the batch.
    """
    keeping_batch = batch_keeping_changes(request.params)
    halving = _halved_batch(request.params)

    # First one change at a time, to give up no more than necessary.
    helped = False
    for name, settings in (keeping_batch | halving).items():
        trial = trials.compile_trial(request, settings, folder, name)
        helped = helped or trial.fits
        yield trial

    # Recomputing whole blocks saves more than recomputing all but products, and excludes it.
    together = dict(keeping_batch)
    together.pop(_REMAT_NAMES[Remat.ALL_BUT_PRODUCTS], None)
    combinations = [together]
    if halving:
        combinations.append(together | halving)

    # A combination of one change has been tried, and combinations are not needed after a success.
    for combination in combinations:
        if len(combination) > 1 and not helped:
            changes = list(itertools.chain(*combination.values()))
            trial = trials.compile_trial(request, changes, folder, ", ".join(combination))
            helped = trial.fits
            yield trial


def batch_keeping_changes(params: Params) -> _Changes:
    """Returns each change that the experiment has not made yet, the cheapest first."""
    # Recomputation costs only time, and does not change results.
    changes: _Changes = {}
    for remat, name in _REMAT_NAMES.items():
        settings = _remat_settings(params, remat)
        if settings:
            changes[name] = settings

    # These two change the results.
    if "activation_dtype" in params.task and params.task.activation_dtype != "bfloat16":
        changes["activations in bfloat16"] = ["task.activation_dtype=bfloat16"]

    settings = _halved_groups(params)
    if settings:
        changes["groups of half as many tokens"] = settings
    return changes


def _remat_settings(params: Params, remat: Remat) -> list[str]:
    """Returns the settings of `remat` for the stacks that keep more than it does."""
    settings = []
    for stack in params.task.cls.STACKS:
        present = params.task.Get(stack).remat
        if not remat.keeps(present):
            settings.append(f"task.{stack}.remat={remat.name}")
    return settings


def _halved_groups(params: Params) -> list[str]:
    """Returns the settings that halve the group size; empty if a stack's groups have one token.

    They are also empty if C would not change, since twice as many groups would then have twice the
    total of buffers.
    """
    settings = []
    for stack, length in params.task.cls.STACKS.items():
        p = params.task.Get(stack)
        if p.moe is None:
            continue

        # A pipeline's groups are a microbatch's.
        rows = params.input.batch_size // max(1, p.microbatches)
        tokens = rows * params.input.Get(length)
        size = group_size(p.moe, tokens)
        half = size // 2

        if half == 0 or train_places(p.moe, half) == train_places(p.moe, size):
            return []
        settings.append(f"task.{stack}.moe.group_size={half}")
    return settings


def _halved_batch(params: Params) -> _Changes:
    """Returns the change to half of the batch; empty if the number of rows is odd."""
    rows = params.input.batch_size
    if rows % 2:
        return {}
    return {"half as many tokens a core": [f"input.batch_size={rows // 2}"]}
