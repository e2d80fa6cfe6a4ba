"""Candidates as data, their ranking and its reason."""

import pytest

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.planning import plan_store, search
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.sharding.layout import Partitioning
from tests.planning import plans

_REQUEST = Request("m4.MoE128E12L", (), Params(), "v3:8x8")


def _names(num_experts, cores):
    return [each.name for each in search.candidates(num_experts, cores)]


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
def test_every_candidate_is_a_partitioning_of_all_cores(num_experts):
    for each in search.candidates(num_experts, 128):
        parts = Partitioning.from_dict(each.mesh, each.table)
        assert parts.num_partitions == 128
        assert parts.factor("BLM")[0] == 128  # The batch over all of them, always.


def _planned(steps):
    def planned(request, folder):
        step = steps[folder.name]
        if isinstance(step, str):
            raise ValueError(step)
        return plans.plan(plans.cost(step) if step else None)

    return planned


def test_what_fits_is_ranked_and_the_choice_explained(monkeypatch, tmp_path):
    tried = list(search.candidates(128, 128))[:4]
    steps = dict(
        data_parallel_only=None,
        data_parallel_all_weights_split_over_M_ZeRO=0.75,
        data_parallel_dense_weights_split_over_H="E=7 is not divisible by the 128 partitions\nmore",
        experts_on_the_batch_s_axis_the_paper_s=0.5,
    )
    monkeypatch.setattr(plan_store, "planned", _planned(steps))
    judged = list(search.search(_REQUEST, tried, tmp_path))
    assert [each.candidate.name for each in judged] == [each.name for each in tried]
    table = search.table(judged)
    assert [line.split(" " * 4)[0] for line in table.splitlines()[1:3]] == [
        tried[3].name,
        tried[1].name,
    ]
    assert "chosen: experts on the batch's axis (the paper's): 1.50 times as fast as" in table
    assert "does not fit in 15.48" in table
    assert "refused: E=7 is not divisible by the 128 partitions" in table and "more" not in table


def test_nothing_fits(monkeypatch, tmp_path):
    tried = list(search.candidates(128, 128))[:1]
    monkeypatch.setattr(plan_store, "planned", _planned({"data_parallel_only": None}))
    judged = list(search.search(_REQUEST, tried, tmp_path))
    assert search.table(judged).endswith("chosen: none, for none fits.")
