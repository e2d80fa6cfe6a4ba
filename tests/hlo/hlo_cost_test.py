"""Costs read from compiled texts, against arithmetic and against XLA's own counts."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import hlo_cost, hlo_text
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions

_ROWS, _WIDTH, _TRIPS = 16, 24, 5


def _module(*instructions, fused=()):
    lines = ["HloModule m, num_partitions=1"]
    if fused:
        lines += ["%fused (p: f32[1]) -> f32[1] {", *fused, "}"]
    return hlo_text.parse("\n".join([*lines, "ENTRY %main () -> f32[] {", *instructions, "}"]))


def _only(module):
    (cost,) = hlo_cost.costs(module)
    return cost


def _convolution(lhs, rhs, out, rest):
    return _only(
        _module(
            f"  %a = {lhs} parameter(0)",
            f"  %b = {rhs} parameter(1)",
            f"  ROOT %c = {out} convolution(%a, %b), {rest}",
        )
    )


def _power() -> AnnotatedFn:
    """x @ w five times over, in a loop."""

    def fn(args: NestedMap) -> NestedMap:
        def body(i, x):
            return i + 1, tf.tanh(x @ args.w)

        _, x = tf.while_loop(lambda i, _: i < _TRIPS, body, [0, args.x], maximum_iterations=_TRIPS)
        return NestedMap(x=x)

    args = NestedMap(
        x=functions.f32((8 * _ROWS, _WIDTH), "B_"), w=functions.f32((_WIDTH, _WIDTH), "__")
    )
    return AnnotatedFn("power", fn, ("args",), (args,), {"x": "B_"})


@pytest.fixture(scope="module")
def power():
    return compile_program(lowering.export(_power(), functions.partitioning(8)))


def test_a_loops_body_counts_as_often_as_it_runs(power):
    costs = hlo_cost.costs(hlo_text.parse(power.as_text()))
    products = [cost for cost in costs if cost.flops]
    assert [(cost.flops, cost.times) for cost in products] == [
        (2 * _ROWS * _WIDTH * _WIDTH, _TRIPS)
    ]
    assert products[0].op_name.endswith("/while/matmul")


def test_once_through_every_loop_are_xlas_own_counts(power):
    costs = hlo_cost.costs(hlo_text.parse(power.as_text()))
    accessed = sum(cost.accessed_bytes for cost in costs)
    assert accessed == pytest.approx(power.report().accessed_bytes, rel=0.15)
    tanhs, counters = _ROWS * _WIDTH, 10
    assert sum(cost.flops for cost in costs) == pytest.approx(
        power.report().flops, abs=tanhs + counters
    )


def test_a_product_as_the_tpu_writes_it():
    # [2, 1024, 1024] x [1024, 16, 128], its heads as a window over padding.
    cost = _convolution(
        "bf16[1,2048,1024]{2,1,0}",
        "bf16[16,1024,128]{2,1,0}",
        "bf16[16,2048,128]{2,1,0}",
        "window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
    )
    assert cost.flops == 2 * 2048 * 1024 * 16 * 128
    assert cost.accessed_bytes == 2 * (2048 * 1024 + 16 * 1024 * 128 + 16 * 2048 * 128)
    assert cost.result_bytes == 2 * 16 * 2048 * 128


def test_a_batch_of_products_as_the_tpu_writes_it():
    # [2, 16, 32, 8] x [2, 16, 8, 64]: both batch dims are dilated, a window meets one of each.
    cost = _convolution(
        "f32[2,16,32,8]{3,2,1,0}",
        "f32[2,16,8,64]{3,2,1,0}",
        "f32[2,16,32,64]{3,2,1,0}",
        "window={size=2x16 stride=1x15 lhs_dilate=2x16}, dim_labels=01bf_01io->01bf",
    )
    assert cost.flops == 2 * 2 * 16 * 32 * 8 * 64


@pytest.mark.parametrize(
    ("window", "size", "kernel", "out", "pairs"),
    [
        ("size=3", 10, 3, 8, 24),
        ("size=3 pad=1_1", 10, 3, 10, 28),
        ("size=3 stride=2 pad=1_1", 10, 3, 5, 14),
        ("size=3 rhs_dilate=2", 10, 3, 6, 18),
        ("size=1 stride=2", 10, 1, 5, 5),
        ("size=3 lhs_dilate=2 pad=2_2", 4, 3, 9, 12),
    ],
)
def test_padding_and_dilation_are_not_multiplied(window, size, kernel, out, pairs):
    cost = _convolution(
        f"f32[5,{size},7]{{2,1,0}}",
        f"f32[{kernel},7,11]{{2,1,0}}",
        f"f32[5,{out},11]{{2,1,0}}",
        f"window={{{window}}}, dim_labels=b0f_0io->b0f",
    )
    assert cost.flops == 2 * 5 * 7 * 11 * pairs


def test_a_fusion_reads_of_a_sliced_operand_the_slice_and_writes_an_update_in_place():
    fused = [
        "  %stack = f32[9,64]{1,0} parameter(0)",
        "  %i = s32[] parameter(1)",
        "  %sum = f32[9,64]{1,0} parameter(2)",
        "  %z = s32[] constant(0)",
        "  %one = f32[1,64]{1,0} dynamic-slice(%stack, %i, %z), dynamic_slice_sizes={1,64}",
        "  %twice = f32[1,64]{1,0} add(%one, %one)",
        "  ROOT %put = f32[9,64]{1,0} dynamic-update-slice(%sum, %twice, %i, %z)",
    ]
    module = _module(
        "  %a = f32[9,64]{1,0} parameter(0)",
        "  %b = s32[] parameter(1)",
        "  %c = f32[9,64]{1,0} parameter(2)",
        "  ROOT %f = f32[9,64]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused",
        fused=fused,
    )
    cost = _only(module)
    assert cost.accessed_bytes == 4 * 64 + 4 + 4 * 64
    assert cost.flops == 0


def test_a_fusion_within_a_fusion_reads_the_slice_and_writes_the_update_alone():
    text = """HloModule m
%inner (stack: f32[9,64], i: s32[], sum: f32[9,64]) -> f32[9,64] {
  %stack = f32[9,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %sum = f32[9,64]{1,0} parameter(2)
  %z = s32[] constant(0)
  %one = f32[1,64]{1,0} dynamic-slice(%stack, %i, %z), dynamic_slice_sizes={1,64}
  ROOT %put = f32[9,64]{1,0} dynamic-update-slice(%sum, %one, %i, %z)
}
%outer (a: f32[9,64], b: s32[], c: f32[9,64]) -> f32[9,64] {
  %a = f32[9,64]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %c = f32[9,64]{1,0} parameter(2)
  ROOT %f = f32[9,64]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%inner
}
ENTRY %main (p: f32[9,64], q: s32[], r: f32[9,64]) -> f32[9,64] {
  %p = f32[9,64]{1,0} parameter(0)
  %q = s32[] parameter(1)
  %r = f32[9,64]{1,0} parameter(2)
  ROOT %g = f32[9,64]{1,0} fusion(%p, %q, %r), kind=kLoop, calls=%outer
}
"""
    assert _only(hlo_text.parse(text)).accessed_bytes == 4 * 64 + 4 + 4 * 64


def test_a_fusions_name_is_its_largest_products():
    fused = [
        "  %p = f32[8,4]{1,0} parameter(0)",
        "  %q = f32[4,2]{1,0} parameter(1)",
        "  %d = f32[8,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        'metadata={op_name="the/product"}',
        '  ROOT %n = f32[8,2]{1,0} negate(%d), metadata={op_name="the/sign"}',
    ]
    module = _module(
        "  %a = f32[8,4]{1,0} parameter(0)",
        "  %b = f32[4,2]{1,0} parameter(1)",
        "  ROOT %f = f32[8,2]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused, "
        'metadata={op_name="the/sign"}',
        fused=fused,
    )
    cost = _only(module)
    assert (cost.op_name, cost.flops) == ("the/product", 2 * 8 * 4 * 2)
    assert cost.accessed_bytes == 4 * (8 * 4 + 4 * 2 + 8 * 2)


def test_what_has_no_name_takes_its_neighbours():
    module = _module(
        '  %a = f32[4]{0} parameter(0), metadata={op_name="args[0]"}',
        "  %before = f32[4]{0} copy(%a)",
        '  %named = f32[4]{0} negate(%before), metadata={op_name="layer/negate"}',
        "  %after = f32[4]{0} copy(%named)",
        '  ROOT %last = f32[4]{0} add(%after, %a), metadata={op_name="other/add"}',
    )
    names = {cost.name: cost.op_name for cost in hlo_cost.costs(module)}
    assert names == {
        **{name: "layer/negate" for name in ("before", "named", "after")},
        "last": "other/add",
    }


def test_a_loop_of_unknown_length_is_refused():
    text = """HloModule m
%cond (s: (s32[], s32[])) -> pred[] {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %l = pred[] compare(%i, %n), direction=LT
}
%body (t: (s32[], s32[])) -> (s32[], s32[]) {
  %t = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %m = s32[] get-tuple-element(%t), index=1
  %k = s32[] add(%j, %j)
  ROOT %r = (s32[], s32[]) tuple(%k, %m)
}
ENTRY %main (n: s32[]) -> (s32[], s32[]) {
  %a = s32[] constant(1)
  %b = s32[] parameter(0)
  %start = (s32[], s32[]) tuple(%a, %b)
  ROOT %w = (s32[], s32[]) while(%start), condition=%cond, body=%body
}
"""
    with pytest.raises(ValueError, match="the text does not tell how often it runs (body|cond)"):
        hlo_cost.costs(hlo_text.parse(text))
