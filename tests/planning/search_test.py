"""Candidate partitionings and their ranking; changes that save memory when a plan does not fit."""

import dataclasses
import re

import pytest

from lingvo_gshard import registry
from lingvo_gshard.layers.repeat import Remat
from lingvo_gshard.model import placement
from lingvo_gshard.planning import plan, planner, search
from lingvo_gshard.planning.planner import Request
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
    params = registry.get_params(_MODEL).Set(**settings)
    return Request(_MODEL, (), params, "v3:2x2", placement.partitioning(params, 8))


def _names(num_experts, cores):
    return [name for name, _ in search.candidates(num_experts, cores)]


def test_as_many_experts_as_cores():
    names = _names(128, 128)
    assert "experts on the batch's axis (the paper's)" in names
    assert "experts x data, 64 x 2" in names and "data parallel only" in names
    assert len(set(names)) == len(names) == 9


def test_fewer_experts_than_cores_lie_on_an_axis_of_their_own():
    names = _names(32, 128)
    assert "experts on the batch's axis (the paper's)" not in names
    assert "experts x data, 32 x 4" in names and "experts x data, 64 x 2" not in names


def test_a_dense_model_has_no_experts_to_place():
    assert all("experts" not in name and "paper" not in name for name in _names(None, 128))


@pytest.mark.parametrize("num_experts", [128, 32, None])
def test_every_candidate_splits_the_batch_over_all_cores(num_experts):
    for _, parts in search.candidates(num_experts, 128):
        assert parts.num_partitions == parts.factor("BLM")[0] == 128


def _searched(monkeypatch, tmp_path, step_secs):
    """Searches with a plan of such a step for each folder, None if it does not fit, or an error.

    Returns the lines of the candidates, those of the ranking, those of the chosen one's programs if
    one fits, and what was planned besides the candidates' training steps: programs by folder.
    """
    asked = []

    def planned(request, folder):
        asked.append((folder.name, request.programs))
        secs = step_secs.get(folder.name)
        if isinstance(secs, str):
            raise ValueError(secs)
        made = plans.plan(plans.cost(secs) if secs else None)
        programs = dict.fromkeys(request.programs, made.step)
        return dataclasses.replace(made, programs=programs)

    monkeypatch.setattr(planner, "planned", planned)
    sizes = {"task.source_vocab_size": 64, "task.target_vocab_size": 32, "input.batch_size": 64}
    names, found = _names(8, 8), list(search.search_lines(_request(**sizes), tmp_path))
    assert [line.partition(":")[0] for line in found[: len(names)]] == names
    assert {programs for _, programs in asked[: len(names)]} == {(plan.TRAIN,)}
    tables = [text.splitlines()[1:] for text in found[len(names) :]]
    return found[: len(names)], *tables, dict(asked[len(names) :])


def test_what_fits_is_ranked_and_the_choice_is_explained(monkeypatch, tmp_path):
    step_secs = {
        "data_parallel_all_weights_split_over_M_ZeRO": 0.75,
        "data_parallel_dense_weights_split_over_H": "E=7 is not divisible by 8 partitions\nmore",
        "experts_on_the_batch_s_axis_the_paper_s": 0.5,
    }
    progress, ranking, programs, besides = _searched(monkeypatch, tmp_path, step_secs)
    assert besides == {"experts_on_the_batch_s_axis_the_paper_s": plan.PROGRAMS}
    assert [line.split()[0] for line in programs[1:5]] == list(plan.PROGRAMS)
    unfit = "data parallel only: does not fit, 20.00 of 15.48 GiB"
    refused = (
        "data parallel, dense weights split over H: refused: E=7 is not divisible by 8 partitions"
    )
    assert progress[0] == unfit and progress[2] == refused
    assert progress[1].endswith(" (ZeRO): fits, 9.00 GiB, 750.00 ms a step")
    head, first, second, *others, choice = ranking
    assert head.split() == ["partitioning", "GiB", "step", "ms", "compute", "memory", "network"]
    assert first.split("  ")[0] == "experts on the batch's axis (the paper's)"
    assert second.split()[-5:] == ["9.00", "750.00", "325.00", "325.00", "100.00"]
    assert {unfit, refused} <= set(others) and len(others) == len(progress) - 2
    assert choice.startswith(
        "chosen: experts on the batch's axis (the paper's): 1.50 times as fast as data parallel, "
        "all weights split over M (ZeRO) at the roofline, most of it "
    )


def test_nothing_fits(monkeypatch, tmp_path):
    _, ranking, besides = _searched(monkeypatch, tmp_path, {})
    assert ranking[-1] == "chosen: none, for none fits." and not besides


def _planned(monkeypatch, fits):
    """Makes plans that fit if `fits(request)`; returns the requests by their folders' names."""
    asked = {}

    def planned(request, folder):
        asked[folder.name] = request
        made = plans.cost() if fits(request) else None
        return plans.plan(made, settings=request.settings)

    monkeypatch.setattr(planner, "planned", planned)
    return asked


def _remedies(request, tmp_path):
    return list(search.remedies(request, tmp_path))


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


def test_the_remedies_follow_a_plan_that_does_not_fit(monkeypatch, tmp_path):
    _planned(monkeypatch, lambda request: request.settings)
    text, _, *remedies = search.plan_lines(_request(), tmp_path)
    assert "does NOT fit" in text and len(remedies) == len(_FOLDERS)
    assert remedies[2] == (
        "  activations in bfloat16: fits, 9.00 GiB, 500.00 ms a step "
        "(--set=task.activation_dtype=bfloat16)"
    )


def test_executables_are_saved_of_a_plan_that_fits(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "save_training", lambda request, folder: f"saved in {folder}")
    _planned(monkeypatch, lambda request: True)
    assert len(list(search.plan_lines(_request(), tmp_path))) == 1
    _, saved = search.plan_lines(_request(), tmp_path, save=True)
    assert saved == f"saved in {tmp_path}/executables"
    _planned(monkeypatch, lambda request: request.settings)
    with pytest.raises(ValueError, match="--save: a step does not fit, so nothing was saved"):
        list(search.plan_lines(_request(), tmp_path, save=True))


def test_the_settings_given_are_those_that_were_planned(monkeypatch, tmp_path):
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


def test_if_none_suffices_all_are_tried_at_once(monkeypatch, tmp_path):
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
    assert re.search(r"a core: refused: B=4 is .* partitions$", str(tried[-1]))


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
