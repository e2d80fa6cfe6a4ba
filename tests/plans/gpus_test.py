"""Plans for GPUs, by XLA's own compiler for them."""

import pathlib

import pytest

from lingvo_gshard.plans import kept_plans, run_programs
from lingvo_gshard.plans.request import make_request
from tests.xla_spmd import compilers

_SMALL = (
    "task.source_vocab_size=512",
    "task.target_vocab_size=256",
    "task.dim=64",
    "input.batch_size=64",
)


@pytest.fixture(autouse=True)
def _has_a_compiler():
    compilers.need("h100")


def _collectives(plan):
    found = {}
    for each in plan.step.cost.collectives:
        found[each.kind] = found.get(each.kind, 0) + each.count
    return found


@pytest.mark.slow
def test_a_toy_on_one_host_exchanges_only_its_tokens():
    plan = run_programs.make_plan(make_request("toy.MoE8E4L", "h100:1x8", _SMALL, None).step_only())
    assert plan.step.fits and plan.cores == 8
    # Two layers with experts: tokens go there and back, forward and backward.
    assert _collectives(plan)["all-to-all"] == 8
    assert "all-gather" not in _collectives(plan) and not plan.step.suspicious
    for name in ("experts", "feed_forward", "projection"):
        assert plan.step.cost.flops_per_core[name] > 0, name
    needed = plan.model_flops_per_core
    assert needed <= sum(plan.step.cost.flops_per_core.values()) <= 1.5 * needed


@pytest.mark.slow
@pytest.mark.exhaustive
def test_12_billion_weights_on_128_gpus(tmp_path):
    request = make_request("m4.MoE128E12L", "h100:16x8", (), None).step_only()
    plan = kept_plans.load_or_make(request, pathlib.Path(tmp_path))
    assert plan.step.fits and plan.step.memory_gib.peak < 20 and not plan.step.suspicious
    assert _collectives(plan)["all-to-all"] == 8 * 3  # In loops over three pairs of layers.
    # Most of the exchange is between hosts, so that the adapters, not NVLink, decide.
    assert plan.step.cost.roofline_secs.network > 0
