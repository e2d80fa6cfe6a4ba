"""Tests for repro/families.py."""

import pytest

from lingvo_gshard.runs import launch
from repro import families
from repro.quality import curves

_FACTS = launch.DataFacts(12000, 6000, ("aa",))


def _params(model):
    asked = launch.Launch(model.experiment, model.settings, "data", _FACTS)
    return launch.experiment_params(asked)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.BY_NAME.values())
def test_experts_cost_as_much_as_the_dense_layers_that_they_replace(family):
    flops = {}
    for model in family.models([8, 32], depths=[4, 8]):
        flops[model.name] = curves.flops_per_token(_params(model))
    dense, eight, many, *_, deep = flops.values()
    assert (eight, many) == (pytest.approx(dense, rel=0.03), pytest.approx(dense, rel=0.03))
    assert len(flops) == (4 if family.num_layers == 4 else 5)
    assert deep > 1.2 * eight


@pytest.mark.slow
def test_a_grid_has_each_number_of_experts_in_each_depth_and_deep_dense_models():
    models = list(families.NARROW.grid([8, 32], [12], [24]))
    assert [model.name for model in models] == [
        "T(6L, M64)",
        "MoE(8E, 6L, M64)",
        "MoE(32E, 6L, M64)",
        "MoE(8E, 12L, M64)",
        "MoE(32E, 12L, M64)",
        "T(24L, M64)",
    ]
    dense, *_, deep = (_params(model) for model in models)
    assert (deep.task.encoder.num_layers, deep.task.decoder.num_layers) == (12, 12)
    assert curves.flops_per_token(deep) > 2.5 * curves.flops_per_token(dense)
    # They differ in nothing else.
    for stack in (deep.task.encoder, deep.task.decoder):
        stack.num_layers = 3
    assert deep.task == dense.task


def test_each_of_many_experts_has_several_places_in_a_group():
    _, mixture = families.SMALL.models([128])
    params = _params(mixture)
    for stack in (params.task.encoder, params.task.decoder):
        assert 2 * stack.moe.group_size // stack.moe.num_experts == 8
