"""Rooflines of costs made by hand; a TPU program with a loop against its unrolled form."""

import types

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import hlo_cost
from lingvo_gshard.hlo.collectives import Collective
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.planning.compiled import roofline
from lingvo_gshard.planning.compiled.categories import Category
from lingvo_gshard.planning.compiled.compiled_step import CompiledStep
from lingvo_gshard.planning.estimate.hardware import GENERATIONS
from lingvo_gshard.planning.estimate.networks import Torus
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.spmd import compilers, functions

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
    made = roofline.cost(CompiledStep(report, costs, {}), _TORUS)
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


def test_what_the_gradient_repeats_is_summed_on_its_own():
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
    made = roofline.cost(CompiledStep(report, costs, {}), _TORUS)
    network = 3 * _TORUS.collective_secs(exchanges[0])
    assert made.recomputed_flops_per_core == 3 * 61.5e12
    assert made.recomputed_flops_share == pytest.approx(3 / 6)
    assert made.recomputed_secs.network == network
    assert made.recomputed_secs.step == pytest.approx(3.0 + network)
    whole = 6.0 + network * 8 / 3
    assert made.recomputed_time_share == pytest.approx((3.0 + network) / whole)


def test_what_runs_beside_a_collective_is_told_apart():
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
    made = roofline.cost(CompiledStep(report, (product, after), {}), _TORUS)
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


def _powers(unrolled: bool) -> AnnotatedFn:
    """Returns a function that sends x through _TRIPS layers of stacked weights."""

    def layer(x, w):
        return tf.nn.relu(tf.einsum("BM,MH->BH", x, w)) + x

    def fn(args: NestedMap) -> NestedMap:
        if unrolled:
            x = args.x
            for i in range(_TRIPS):
                x = layer(x, args.w[i])
            return NestedMap(x=x)
        body = lambda i, x: (i + 1, layer(x, tf.gather(args.w, i)))  # noqa: E731
        _, x = tf.while_loop(lambda i, _: i < _TRIPS, body, [0, args.x], maximum_iterations=_TRIPS)
        return NestedMap(x=x)

    args = NestedMap(
        x=functions.f32((8 * _WIDTH, _WIDTH), "BM"),
        w=functions.f32((_TRIPS, _WIDTH, _WIDTH), "___"),
    )
    return AnnotatedFn("powers", fn, ("args",), (args,), {"x": "BM"})


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True])
def test_costs_add_up_to_the_compilers_optimal_seconds(unrolled):
    compilers.need("v3")
    exported = lowering.export(_powers(unrolled), functions.partitioning(8))
    compiled = topology.compile_program(exported, "v3:2x2")
    costs = hlo_cost.costs(compiled.module)
    assert sum(cost.flops * cost.times for cost in costs) == 2 * _TRIPS * _WIDTH**3
    rates = _V3.xla_peak_flops, _V3.xla_memory_bytes_per_sec
    once = [max(cost.flops / rates[0], cost.accessed_bytes / rates[1]) for cost in costs]
    assert sum(once) == pytest.approx(compiled.report().optimal_secs, rel=0.15)
    factor = roofline.loop_factor(costs, _V3)
    assert factor == 1.0 if unrolled else 3 < factor <= _TRIPS
