"""Rooflines of costs made by hand; a TPU program with a loop against its unrolled form."""

import types

import pytest

from lingvo_gshard.plans.categories import FIGURE_8, Category
from xla_plan.cost import roofline
from xla_plan.cost.compiled_step import CompiledStep
from xla_plan.machines.hardware import GENERATIONS
from xla_plan.machines.networks import Torus
from xla_spmd.hlo.collectives import Collective
from xla_spmd.hlo.hlo_cost import Cost

_V3 = GENERATIONS["v3"]
_TORUS = Torus(_V3, tuple((x, y) for x in range(2) for y in range(2) for _ in range(2)))
_EXPERTS = "call_tf/encoder/layers_1/feed_forward/experts/einsum/Einsum"
_TRIPS, _WIDTH = 6, 2048


def _cost(op_name, flops, accessed_bytes, times=1, opcode="fusion"):
    return Cost("i", opcode, op_name, flops, accessed_bytes, (), times)


def test_the_scarcer_resource_decides_for_each_instruction():
    costs = [
        _cost(_EXPERTS, 61.5e12, 45e9, times=2),  # A second of products, a tenth of memory traffic.
        _cost(_EXPERTS, 6.15e12, 450e9),  # The other way round.
        _cost("call_tf/optimizer/mul", 0, 225e9),
        _cost(_EXPERTS, 0, 1e12, opcode="all-to-all"),  # Counted on the network.
    ]
    exchange = Collective("all-to-all", 2**20, (tuple(range(8)),), times=3, op_name=_EXPERTS)
    report = types.SimpleNamespace(
        collective_ops=[exchange], optimal_secs=0.0, num_instructions=len(costs)
    )
    made = roofline.cost(CompiledStep(report, costs, {}), _TORUS, FIGURE_8)
    found, network = made.roofline_secs_by_category, 3 * _TORUS.collective_secs(exchange)
    assert made.network_secs_by_kind == {"all-to-all": network}
    assert made.flops_per_core[Category.EXPERTS] == 2 * 61.5e12 + 6.15e12
    assert set(found) == {Category.EXPERTS, Category.OPTIMIZER}
    experts = found[Category.EXPERTS]
    assert experts.compute == pytest.approx(2.1) and experts.memory == pytest.approx(1.2)
    assert experts.network == network
    assert experts.step == pytest.approx(3.0 + network)
    assert made.roofline_secs.step == pytest.approx(3.5 + network)
    assert made.roofline_secs.memory == pytest.approx(1.7)


def test_recomputed_operations_are_summed_separately():
    again = "call_tf/while/body/recomputed/encoder/block_1/feed_forward/dispatch/Einsum"
    its_gradient = again.replace("recomputed", "gradient_tape/recomputed")
    costs = [
        _cost(_EXPERTS, 61.5e12, 0),  # A second each.
        _cost(again, 61.5e12, 0, times=3),
        _cost(its_gradient, 61.5e12, 0, times=2),
    ]
    groups = (tuple(range(8)),)
    exchanges = [
        Collective("all-to-all", 2**20, groups, times=3, op_name=again),
        Collective("all-to-all", 2**20, groups, times=5, op_name=its_gradient),
    ]
    report = types.SimpleNamespace(
        collective_ops=exchanges, optimal_secs=0.0, num_instructions=len(costs)
    )
    made = roofline.cost(CompiledStep(report, costs, {}), _TORUS, FIGURE_8)
    network = 3 * _TORUS.collective_secs(exchanges[0])
    assert made.recomputed_flops_per_core == 3 * 61.5e12
    assert made.recomputed_flops_share == pytest.approx(3 / 6)
    assert made.roofline_secs_by_pass["recomputed"].network == network
    assert made.roofline_secs_by_pass["recomputed"].step == pytest.approx(3.0 + network)
    whole = 6.0 + network * 8 / 3
    assert made.recomputed_time_share == pytest.approx((3.0 + network) / whole)


def test_work_beside_a_collective_is_distinguished():
    """Two exchanges of 0.5 s each run beside the same product of 0.75 s, on one network."""
    product = Cost("product", "fusion", _EXPERTS, int(0.75 * 61.5e12), 0, (), times=1)
    after = Cost("after", "fusion", _EXPERTS, int(61.5e12), 0, (), times=1)
    half_a_second = int(0.5 / _TORUS.collective_secs(_exchange(2**40)) * 2**40)
    exchanges = [
        _exchange(half_a_second, beside=("product", "start")),
        _exchange(half_a_second, beside=("product",)),
        _exchange(half_a_second),
    ]
    report = types.SimpleNamespace(collective_ops=exchanges, optimal_secs=0.0, num_instructions=2)
    made = roofline.cost(CompiledStep(report, (product, after), {}), _TORUS, FIGURE_8)
    assert made.roofline_secs.network == pytest.approx(1.5)
    assert made.roofline_secs.step == pytest.approx(1.75 + 1.5)
    assert made.overlapped_secs == pytest.approx(0.75)
    assert made.step_secs == pytest.approx(1.75 + 0.75)


def _exchange(size, beside=()):
    return Collective("all-to-all", size, (tuple(range(8)),), 1, op_name=_EXPERTS, beside=beside)


def test_the_loop_factor_uses_xlas_rates():
    once = _cost("a", _V3.xla_peak_flops, 0)
    often = _cost("b", 0, _V3.xla_memory_bytes_per_sec, times=9)
    assert roofline.loop_factor([once, often], _V3) == pytest.approx((1 + 9) / 2)
    assert roofline.loop_factor([once], _V3) == 1.0
