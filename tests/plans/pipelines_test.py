"""Plans of pipelines."""

import pytest

from lingvo_gshard.plans import run_programs
from lingvo_gshard.plans.request import make_request
from tests.xla_spmd import compilers

_SETTINGS = (
    "mesh=d:*,p:2",
    "sharding=R:p,B:d+p",
    "task.source_vocab_size=512",
    "task.target_vocab_size=256",
    *(
        f"task.{stack}.{setting}"
        for stack in ("encoder", "decoder")
        for setting in (
            *("layers_as=LOOP", "remat=BLOCK", "num_layers=4"),
            *("stages=2", "microbatches=4"),
        )
    ),
)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["v3:2x2", "h100:1x8"])
def test_a_pipeline_shifts_activations_in_every_tick_and_sums_gradients_once(name):
    compilers.need(name)
    plan = run_programs.make_plan(make_request("toy.Dense4L", name, _SETTINGS, None).step_only())
    assert plan.step.fits and plan.bubble == 1 / 5

    def collectives(kind):
        return [each for each in plan.step.cost.collectives if each.kind == kind]

    # Two stacks, each forward, again and backward, in 5 ticks.
    assert sum(each.count for each in collectives("collective-permute")) >= 2 * 3 * 5
    assert sum(each.bytes for each in collectives("all-reduce")) < 4 * plan.weights
