"""Changes that save memory when a plan does not fit."""

import dataclasses
import re

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.model import placement
from lingvo_gshard.plans import kept_plans, remedies
from lingvo_gshard.plans.request import Request
from tests.xla_plan import samples
from xla_plan.searches import trials_text

_MODEL = "toy.MoE8E4L"
_FOLDERS = [
    "all_but_large_products_computed_again",
    "whole_blocks_computed_again",
    "activations_in_bfloat16",
    "groups_of_half_as_many_tokens",
    "half_as_many_tokens_a_core",
]


def _request(**settings):
    params = registry.get_params(_MODEL).Set(**settings)
    return Request(_MODEL, (), params, "v3:2x2", placement.partitioning(params, 8))


def _planned(monkeypatch, fits):
    """Makes plans that fit if `fits(request)`; returns the requests by their folders' names."""
    asked = {}

    def planned(request, folder):
        asked[folder.name] = request
        made = samples.cost() if fits(request) else None
        return samples.plan(made, settings=request.settings)

    monkeypatch.setattr(kept_plans, "load_or_make", planned)
    return asked


def _remedies(request, tmp_path):
    return list(remedies.trials_of(request, tmp_path))


def test_each_change_that_the_experiment_leaves_open_is_tried(monkeypatch, tmp_path):
    asked = _planned(monkeypatch, lambda request: True)
    tried = _remedies(_request(), tmp_path)
    assert list(asked) == _FOLDERS
    assert [trial.request.settings for trial in tried] == [
        ("task.encoder.remat=ALL_BUT_PRODUCTS", "task.decoder.remat=ALL_BUT_PRODUCTS"),
        ("task.encoder.remat=BLOCK", "task.decoder.remat=BLOCK"),
        ("task.activation_dtype=bfloat16",),
        ("task.encoder.moe.group_size=64", "task.decoder.moe.group_size=64"),
        ("input.batch_size=16",),
    ]


def test_tried_settings_include_the_given_ones(monkeypatch, tmp_path):
    given = ("train.seed=3",)
    request = dataclasses.replace(
        _request(), settings=given, params=registry.get_params(_MODEL, given)
    )
    asked = _planned(monkeypatch, lambda request: False)
    _remedies(request, tmp_path)
    assert len(asked) == len(_FOLDERS) + 2
    for each in asked.values():
        assert each.settings[:1] == given and len(each.settings) > 1
        assert registry.get_params(_MODEL, each.settings) == each.params


def test_all_changes_are_tried_together_if_no_single_one_suffices(monkeypatch, tmp_path):
    def fits(request):
        return request.params.input.batch_size == 16 and "task.encoder.remat=BLOCK" in (
            request.settings
        )

    _planned(monkeypatch, fits)
    *alone, gentle, all_at_once = _remedies(_request(), tmp_path)
    assert len(alone) == 5 and not any(trial.fits for trial in (*alone, gentle))
    assert gentle.name == (
        "whole blocks computed again, activations in bfloat16, groups of half as many tokens"
    )
    assert all_at_once.fits
    assert all_at_once.request.settings == (*gentle.request.settings, "input.batch_size=16")


def test_combinations_end_with_the_first_that_fits(monkeypatch, tmp_path):
    _planned(monkeypatch, lambda request: len(request.settings) == 5)
    *_, trial = _remedies(_request(), tmp_path)
    assert trial.fits and trial.name.endswith("groups of half as many tokens")


def test_a_change_that_the_cores_refuse_does_not_stop_the_others(monkeypatch, tmp_path):
    def fits(request):
        if request.params.input.batch_size == 4:
            raise ValueError("B=4 is not divisible by the 8 partitions\nand more")
        return True

    _planned(monkeypatch, fits)
    tried = _remedies(_request(**{"input.batch_size": 8}), tmp_path)
    assert [trial.fits for trial in tried] == [True] * 4 + [False]
    assert re.search(r"a core: refused: B=4 is .* partitions$", trials_text.trial_line(tried[-1]))


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
    assert not _remedies(request, tmp_path)


def test_groups_are_not_halved_where_experts_would_keep_as_many_places():
    """With 128 tokens for 8 experts C is 32, and 16 in half of a group."""
    name = "groups of half as many tokens"
    assert name in remedies.batch_keeping_changes(_request().params)
    rounded = {"task.decoder.moe.train_capacity.multiple_of": 32}
    assert name not in remedies.batch_keeping_changes(_request(**rounded).params)


def test_a_pipelines_groups_stay_within_a_microbatch():
    """A microbatch's one row has 64 tokens, fewer than the default group of a tenth of H."""
    pipeline = {"task.encoder.stages": 2, "task.encoder.microbatches": 32}
    groups = {"task.encoder.moe.group_size": None, "task.encoder.moe.hidden_dim": 2560}
    changes = remedies.batch_keeping_changes(_request(**pipeline, **groups).params)
    assert changes["groups of half as many tokens"][0] == "task.encoder.moe.group_size=32"
