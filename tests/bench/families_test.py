"""Tests for bench/families.py."""

import pytest

from bench import curves, families
from lingvo_gshard.train import launch

_FACTS = launch.DataFacts(12000, 6000, ("aa",))


@pytest.mark.parametrize("family", [families.SMALL, families.TOY])
def test_experts_cost_as_much_as_the_dense_layers_that_they_replace(family):
    flops = {}
    for model in family.models([8, 32], depths=[4, 8]):
        asked = launch.Launch(model.experiment, model.settings, "data", _FACTS)
        flops[model.name] = curves.flops_per_token(launch.experiment_params(asked))
    layers = family.num_layers
    dense = flops[f"T({layers}L)"]
    for count in (8, 32):
        assert flops[f"MoE({count}E, {layers}L)"] == pytest.approx(dense, rel=0.03)
    assert len(flops) == (4 if layers == 4 else 5)
    assert flops["MoE(8E, 8L)"] > 1.2 * flops[f"MoE(8E, {layers}L)"]
