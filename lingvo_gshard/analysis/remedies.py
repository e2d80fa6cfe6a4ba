"""What would make a plan fit that does not: changes, each checked by compiling."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

from lingvo_gshard.analysis import plan_store
from lingvo_gshard.analysis.plan import Plan
from lingvo_gshard.analysis.planner import Request
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.moe import group_size
from lingvo_gshard.layers.repeat import Remat

_THRIFT = (Remat.NONE, Remat.ALL_BUT_PRODUCTS, Remat.BLOCK)  # Each keeps less.


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change, and the plan with it."""

    change: str
    plan: Plan


def tried(request: Request, folder: pathlib.Path) -> Iterator[Remedy]:
    """Plans each change that the experiment leaves open, kept in folders below `folder`."""
    for name, change, params in _changes(request.params):
        asked = dataclasses.replace(request, params=params, settings=(*request.settings, change))
        yield Remedy(change, plan_store.planned(asked, folder / name))


def line(remedy: Remedy) -> str:
    """What came of it."""
    verdict = "fits" if remedy.plan.fits else "does not fit"
    return f"  {remedy.change}: {verdict}, {remedy.plan.memory_gib.peak:.2f} GiB"


def _changes(params: Params) -> Iterator[tuple[str, str, Params]]:
    """(a folder's name, what is changed, the experiment with it), the gentlest first."""
    for remat in _THRIFT[1:]:
        changed = _with_remat(params, remat)
        if changed is not None:
            change = f"blocks computed again (remat={remat.name})"
            yield f"remat_{remat.value}", change, changed
    if params.task.activation_dtype != "bfloat16":
        changed = params.Copy().Set(**{"task.activation_dtype": "bfloat16"})
        yield "bfloat16", "activations in bfloat16", changed
    smaller = _smaller_groups(params)
    if smaller is not None:
        yield "groups", "groups of half as many tokens", smaller
    if params.input.batch_size % 2 == 0:
        half = params.input.batch_size // 2
        changed = params.Copy().Set(**{"input.batch_size": half})
        yield "rows", f"half as many tokens a core (input.batch_size={half})", changed


def _with_remat(params: Params, remat: Remat) -> Params | None:
    """Stacks that keep more than with `remat` with it; None where none does."""
    changed, thrift = params.Copy(), _THRIFT.index(remat)
    keys = [f"task.{stack}.remat" for stack in ("encoder", "decoder")]
    wasteful = [key for key in keys if _THRIFT.index(params.Get(key)) < thrift]
    return changed.Set(**dict.fromkeys(wasteful, remat)) if wasteful else None


def _smaller_groups(params: Params) -> Params | None:
    """Groups of half the size; None for a model without experts, or with groups of one token."""
    changed = params.Copy()
    for name, length in (("encoder", "source_len"), ("decoder", "target_len")):
        moe = changed.task.Get(name).moe
        if moe is None:
            return None
        size = group_size(moe, params.input.batch_size * params.input.Get(length))
        if size < 2:
            return None
        moe.group_size = size // 2
    return changed
