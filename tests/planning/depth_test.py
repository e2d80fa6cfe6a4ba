"""Compile times as layers grow."""

import pytest

from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.planning import depth, planner
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import topology
from lingvo_gshard.train import run
from tests.planning import plans


def _params():
    return run.overridden_params(depth.MODEL, depth.SETTINGS)


@pytest.mark.parametrize("num_layers", depth.LAYERS)
def test_what_is_planned_has_that_many_layers_in_two_loops(num_layers):
    task = depth.request(_params(), num_layers).params.task
    for stack in (task.encoder, task.decoder):
        assert stack.num_layers == num_layers // 2
        assert stack.layers_as is Layers.LOOP and stack.remat is Remat.ALL_BUT_PRODUCTS


def test_its_groups_are_dealt_evenly():
    parts = Partitioning.from_dict(Mesh.flat(8), _params().sharding)
    planner._check_groups(depth.request(_params(), 12).params, parts)


def test_the_table_tells_the_last_over_the_first():
    made = [
        plans.plan(plans.cost(instructions=count), compile_cpu_secs=secs)
        for count, secs in ((1000, 20.0), (1100, 22.0), (1200, 29.0))
    ]
    head, *rows, last = depth.table(made).splitlines()
    assert head.split() == ["layers", "instructions", "lower", "s", "compile", "CPU", "s"]
    assert [row.split()[:2] for row in rows] == [["12", "1000"], ["36", "1100"], ["60", "1200"]]
    assert last == "60 layers over 12: x1.45 to compile"


@pytest.mark.slow
def test_sixty_layers_take_little_more_than_twelve():
    if not topology.is_installed():
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            next(depth.measure(_params()))
        return
    made = list(depth.measure(_params()))
    assert made[-1].compile_cpu_secs <= 1.5 * made[0].compile_cpu_secs
    assert made[-1].cost.instructions <= 1.5 * made[0].cost.instructions
