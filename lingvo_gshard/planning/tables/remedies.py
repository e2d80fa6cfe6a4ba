"""Changes that save memory where a training step does not fit, each compiled."""

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.moe import group_size, train_places
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.planning.estimate.cost_model import BY_SAVING
from lingvo_gshard.planning.request import Request
from lingvo_gshard.planning.tables import trials
from lingvo_gshard.planning.tables.trials import Trial

_REMAT_NAMES = {
    Remat.ALL_BUT_PRODUCTS: "all but large products computed again",
    Remat.BLOCK: "whole blocks computed again",
}

_Changes = dict[str, list[str]]  # Settings by the name of the change.


def try_remedies(
    request: Request, folder: pathlib.Path, progress: Callable[[Trial], None]
) -> list[Trial]:
    """Plans each change that may save memory, in folders below `folder`; returns all trials.

    If none suffices, all that keep the batch are combined, then half of the batch with them. Calls
    `progress` with each trial once it is compiled.
    """
    keeping_batch = batch_keeping_changes(request.params)
    halving = _halved_batch(request.params)

    compiled: list[Trial] = []

    def try_change(name: str, settings: Sequence[str]) -> None:
        trial = trials.compile_trial(request, settings, folder, name)
        progress(trial)
        compiled.append(trial)

    # One change at a time, so that no run gives up more than it must.
    for name, settings in (keeping_batch | halving).items():
        try_change(name, settings)

    # Computing whole blocks again saves more than all but products, and excludes it.
    together = dict(keeping_batch)
    together.pop(_REMAT_NAMES[Remat.ALL_BUT_PRODUCTS], None)
    combinations = [together]
    if halving:
        combinations.append(together | halving)

    # A combination of one change has been tried, and none is needed once something has helped.
    for combination in combinations:
        helped = any(trial.fits for trial in compiled)
        if len(combination) > 1 and not helped:
            try_change(", ".join(combination), _all_settings(combination))
    return compiled


def batch_keeping_changes(params: Params) -> _Changes:
    """Returns each change that the experiment has not made yet, the cheapest first."""
    # Recomputation costs time alone and changes no result.
    changes: _Changes = {}
    for remat, name in _REMAT_NAMES.items():
        settings = _remat_settings(params, remat)
        if settings:
            changes[name] = settings

    # These two change what is computed.
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
        if BY_SAVING.index(present) < BY_SAVING.index(remat):
            settings.append(f"task.{stack}.remat={remat.name}")
    return settings


def _halved_groups(params: Params) -> list[str]:
    """Returns the settings of half the group size; none if a stack's groups are of one token.

    There are none either if C would stay as it is, since twice as many groups would then have
    twice the buffers in all.
    """
    settings = []
    for stack, length in params.task.cls.STACKS.items():
        p = params.task.Get(stack)
        if p.moe is None:
            continue

        # A pipeline's groups are those of a microbatch.
        rows = params.input.batch_size // max(1, p.microbatches)
        tokens = rows * params.input.Get(length)
        size = group_size(p.moe, tokens)
        half = size // 2

        if half == 0 or train_places(p.moe, half) == train_places(p.moe, size):
            return []
        settings.append(f"task.{stack}.moe.group_size={half}")
    return settings


def _halved_batch(params: Params) -> _Changes:
    """Returns the change to half of the batch; none if its rows are odd."""
    rows = params.input.batch_size
    if rows % 2:
        return {}
    return {"half as many tokens a core": [f"input.batch_size={rows // 2}"]}


def _all_settings(changes: Mapping[str, Sequence[str]]) -> list[str]:
    return list(itertools.chain(*changes.values()))
