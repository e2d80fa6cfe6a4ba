"""What would make a plan fit that does not: changes, each checked by compiling."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers.moe import group_size
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.planning import plan_store, planner
from lingvo_gshard.planning.plan import Plan
from lingvo_gshard.planning.planner import Request

_THRIFT = (Remat.NONE, Remat.ALL_BUT_PRODUCTS, Remat.BLOCK)  # Each keeps less.


@dataclasses.dataclass(frozen=True)
class Change:
    """Settings that save memory, by path, and what they do in words."""

    what: str
    settings: Mapping[str, object]

    def __add__(self, other: Change) -> Change:
        """Both; of one setting the other's value."""
        return Change(f"{self.what}, {other.what}", {**self.settings, **other.settings})

    def overrides(self) -> tuple[str, ...]:
        """As `path=value`."""
        return tuple(f"{path}={_text(value)}" for path, value in self.settings.items())


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change, and the plan with it, or why there is none."""

    change: Change
    plan: Plan | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether it helps."""
        return self.plan is not None and self.plan.fits


def tried(request: Request, folder: pathlib.Path) -> Iterator[Remedy]:
    """Plans each change that the experiment leaves open, kept in folders below `folder`.

    Where none of them suffices, those that keep the batch at once, then half of it as well.
    """
    gentle, half = list(_keeping_the_batch(request.params)), _half_the_batch(request.params)
    helped = False
    for change in [*gentle, *half]:
        remedy = _planned(request, change, folder)
        helped = helped or remedy.fits
        yield remedy
    for change in [] if helped else _together(gentle, half):
        remedy = _planned(request, change, folder)
        yield remedy
        if remedy.fits:
            return


def line(remedy: Remedy) -> str:
    """What came of it, and how to ask for it."""
    flags = " ".join(f"--set={override}" for override in remedy.change.overrides())
    if remedy.plan is None:
        verdict = f"refused: {remedy.refusal}"
    else:
        fits = "fits" if remedy.fits else "does not fit"
        verdict = f"{fits}, {remedy.plan.memory_gib.peak:.2f} GiB"
    return f"  {remedy.change.what}: {verdict} ({flags})"


def _planned(request: Request, change: Change, folder: pathlib.Path) -> Remedy:
    asked = dataclasses.replace(
        request,
        params=request.params.Copy().Set(**change.settings),
        settings=(*request.settings, *change.overrides()),
    )
    name = re.sub(r"\W+", "_", change.what)
    try:
        return Remedy(change, plan_store.planned(asked, folder / name))
    except ValueError as error:  # Rows or groups that the mesh does not divide, most of all.
        return Remedy(change, None, str(error).splitlines()[0])


def _keeping_the_batch(params: Params) -> Iterator[Change]:
    """Those that the experiment leaves open, the gentlest first."""
    for remat, what in (
        (Remat.ALL_BUT_PRODUCTS, "all but large products computed again"),
        (Remat.BLOCK, "whole blocks computed again"),
    ):
        paths = ["task.encoder.remat", "task.decoder.remat"]
        wasteful = [p for p in paths if _THRIFT.index(params.Get(p)) < _THRIFT.index(remat)]
        if wasteful:
            yield Change(what, dict.fromkeys(wasteful, remat))
    if params.task.activation_dtype != "bfloat16":
        yield Change("activations in bfloat16", {"task.activation_dtype": "bfloat16"})
    sizes = _group_sizes(params)
    if sizes and min(sizes.values()) > 1:
        halves = {path: size // 2 for path, size in sizes.items()}
        yield Change("groups of half as many tokens", halves)


def _half_the_batch(params: Params) -> list[Change]:
    """The change to half as many rows; none where their number is odd."""
    half, rest = divmod(params.input.batch_size, 2)
    return [] if rest else [Change("half as many tokens a core", {"input.batch_size": half})]


def _together(gentle: Sequence[Change], half: Sequence[Change]) -> Iterator[Change]:
    """All that keep the batch at once, then with half of it; none that was a change alone."""
    kept = [
        change
        for i, change in enumerate(gentle)
        if not any(change.settings.keys() <= later.settings.keys() for later in gentle[i + 1 :])
    ]
    if len(kept) > 1:
        yield functools.reduce(operator.add, kept)
    if kept and half:
        yield functools.reduce(operator.add, [*kept, *half])


def _group_sizes(params: Params) -> dict[str, int]:
    """Tokens of a group by the setting that gives them; empty for a model without experts."""
    return {
        f"task.{stack}.moe.group_size": group_size(params.task.Get(stack).moe, tokens)
        for stack, tokens in planner.stacks_tokens(params).items()
        if params.task.Get(stack).moe is not None
    }


def _text(value: object) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)
