"""What is tried when a plan does not fit."""

import dataclasses
import re

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.planning import plan_store, remedies
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.train import run
from tests.planning import plans

_MODEL = "toy.MoE8E4L"
_FOLDERS = [
    "all_but_large_products_computed_again",
    "whole_blocks_computed_again",
    "activations_in_bfloat16",
    "groups_of_half_as_many_tokens",
    "half_as_many_tokens_a_core",
]


def _request(**settings):
    return Request(_MODEL, (), registry.get_params(_MODEL).Set(**settings), "v3:2x2")


def _planned(monkeypatch, fits):
    """Plans that fit where `fits(request)`; the requests by their folders' names."""
    asked = {}

    def planned(request, folder):
        asked[folder.name] = request
        made = plans.cost() if fits(request) else None
        return plans.plan(made, settings=request.settings)

    monkeypatch.setattr(plan_store, "planned", planned)
    return asked


def test_each_that_the_experiment_leaves_open(monkeypatch, tmp_path):
    asked = _planned(monkeypatch, lambda request: True)
    tried = list(remedies.tried(_request(), tmp_path))
    assert list(asked) == _FOLDERS
    assert [remedy.change.overrides() for remedy in tried] == [
        ("task.encoder.remat=ALL_BUT_PRODUCTS", "task.decoder.remat=ALL_BUT_PRODUCTS"),
        ("task.encoder.remat=BLOCK", "task.decoder.remat=BLOCK"),
        ("task.activation_dtype=bfloat16",),
        ("task.encoder.moe.group_size=64", "task.decoder.moe.group_size=64"),
        ("input.batch_size=16",),
    ]
    assert remedies.line(tried[2]) == (
        "  activations in bfloat16: fits, 9.00 GiB (--set=task.activation_dtype=bfloat16)"
    )


def test_the_settings_that_are_told_are_those_that_were_planned(monkeypatch, tmp_path):
    given = ("train.seed=3",)
    request = dataclasses.replace(
        _request(), settings=given, params=run.overridden_params(_MODEL, given)
    )
    asked = _planned(monkeypatch, lambda request: False)
    list(remedies.tried(request, tmp_path))
    assert len(asked) == len(_FOLDERS) + 2
    for each in asked.values():
        assert each.settings[:1] == given and len(each.settings) > 1
        assert run.overridden_params(_MODEL, each.settings) == each.params


def test_where_none_suffices_all_are_tried_at_once(monkeypatch, tmp_path):
    def fits(request):
        return request.params.input.batch_size == 16 and "task.encoder.remat=BLOCK" in (
            request.settings
        )

    _planned(monkeypatch, fits)
    *alone, gentle, all_at_once = remedies.tried(_request(), tmp_path)
    assert len(alone) == 5 and not any(remedy.fits for remedy in (*alone, gentle))
    assert gentle.change.what == (
        "whole blocks computed again, activations in bfloat16, groups of half as many tokens"
    )
    assert all_at_once.fits and all_at_once.change.overrides() == (
        *gentle.change.overrides(),
        "input.batch_size=16",
    )


def test_together_they_end_with_what_fits(monkeypatch, tmp_path):
    _planned(monkeypatch, lambda request: len(request.settings) == 5)
    *_, last = remedies.tried(_request(), tmp_path)
    assert last.fits and last.change.what.endswith("groups of half as many tokens")


def test_a_change_that_the_cores_refuse_is_told_and_the_others_are_tried(monkeypatch, tmp_path):
    def fits(request):
        if request.params.input.batch_size == 4:
            raise ValueError("B=4 is not divisible by the 8 partitions\nand more")
        return True

    _planned(monkeypatch, fits)
    tried = list(remedies.tried(_request(**{"input.batch_size": 8}), tmp_path))
    assert len(tried) == 5 and [remedy.fits for remedy in tried] == [True] * 4 + [False]
    assert re.search(r"a core: refused: B=4 is .* partitions \(--set=", remedies.line(tried[-1]))


@pytest.mark.parametrize("num_experts", [None, 8])
def test_nothing_is_left_to_try(monkeypatch, tmp_path, num_experts):
    _planned(monkeypatch, lambda request: False)
    request = _request(**{"task.activation_dtype": "bfloat16", "input.batch_size": 1})
    for name in ("encoder", "decoder"):
        stack = request.params.task.Get(name).Set(remat=Remat.BLOCK)
        if num_experts is None:
            stack.moe = None
        else:
            stack.moe.group_size = 1
    assert not list(remedies.tried(request, tmp_path))
