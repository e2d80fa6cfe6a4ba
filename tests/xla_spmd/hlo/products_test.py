"""Products, convolutions and library calls: their flops and arithmetic."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.xla_spmd.hlo import hlo_text
from xla_spmd.hlo import hlo_cost, kernels, products

_CUDNN = """
ENTRY main {
  x = bf16[2,9,9,4]{3,2,1,0} parameter(0)
  w = bf16[8,3,3,4]{3,2,1,0} parameter(1)
  dy = bf16[2,4,4,8]{3,2,1,0} parameter(2)
  forward.1 = (bf16[2,4,4,8]{3,2,1,0}, u8[0]{0}) custom-call(x, w), window={size=3x3 stride=2x2},
    dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward",
    backend_config={"cudnn_conv_backend_config":{"conv_result_scale":1}}
  filter.1 = (bf16[8,3,3,4]{3,2,1,0}, u8[4096]{0}) custom-call(x, dy),
    window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f,
    custom_call_target="__cudnn$convBackwardFilter"
  input.1 = (bf16[2,9,9,4]{3,2,1,0}, u8[0]{0}) custom-call(dy, w), window={size=3x3 stride=2x2},
    dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  xf = f32[2,9,9,4]{3,2,1,0} parameter(3)
  wf = f32[8,3,3,2]{3,2,1,0} parameter(4)
  grouped.1 = (f32[2,9,9,8]{3,2,1,0}, u8[0]{0}) custom-call(xf, wf),
    window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, feature_group_count=2,
    custom_call_target="__cudnn$convBiasActivationForward"
  ROOT lu.1 = (f32[64,64]{0,1}, s32[64]{0}) custom-call(xf), custom_call_target="cusolver_getrf_ffi"
}
"""


def _multiplications(x, w, **window):
    """Counts the multiplications of a convolution: with ones, each adds one to the sum."""
    layout = ("NHWC", "HWIO", "NHWC")
    convolution = lax.conv_general_dilated(
        jnp.ones(x), jnp.ones(w), dimension_numbers=layout, **window
    )
    return int(convolution.sum())


def test_cudnns_convolutions_and_their_gradients_count():
    module = hlo_text.module(_CUDNN)
    costs = {cost.name: cost for cost in hlo_cost.costs(module)}
    plain = _multiplications((2, 9, 9, 4), (3, 3, 4, 8), window_strides=(2, 2), padding="VALID")
    for name in ("forward.1", "filter.1", "input.1"):
        assert costs[name].flops == 2 * plain
        assert costs[name].arithmetic == "bf16"

    grouped = _multiplications(
        (2, 9, 9, 4), (3, 3, 2, 8), window_strides=(1, 1), padding="SAME", feature_group_count=2
    )
    assert (costs["grouped.1"].flops, costs["grouped.1"].arithmetic) == (2 * grouped, "f32")

    # The bytes are the operands' and results', without a library's workspace.
    sizes = 2 * 9 * 9 * 4 + 8 * 3 * 3 * 4 + 2 * 4 * 4 * 8
    assert {costs[name].accessed_bytes for name in ("forward.1", "filter.1", "input.1")} == {
        2 * sizes
    }


def test_calls_whose_flops_nobody_knows_are_named_and_any_can_be_given():
    module = hlo_text.module(_CUDNN)
    assert products.uncounted(module, {}) == ("cusolver_getrf_ffi",)
    given = {"cusolver_getrf_ffi": 7, "__cudnn$convForward": 11}
    kernels.check_names(module, given)
    assert products.uncounted(module, given) == ()
    costs = {cost.name: cost.flops for cost in hlo_cost.costs(module, given)}
    assert (costs["lu.1"], costs["forward.1"]) == (7, 11)


def test_calls_that_multiply_nothing_are_not_named():
    module = hlo_text.module("""
ENTRY main {
  x = f32[1024]{0} parameter(0)
  space = f32[8]{0:T(128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  keys = u32[1024]{0} custom-call(x), custom_call_target="X64SplitLow"
  ROOT top = (f32[8]{0}, s32[8]{0}) custom-call(x), custom_call_target="__gpu$TopK"
}
""")
    assert products.uncounted(module, {}) == ()


@pytest.mark.parametrize(
    ("target", "mask", "window", "products_of_pairs"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, 2 * 6 * 8),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, 2 * (1 + 2 + 3 + 4 + 5 + 6)),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 0, 5 * (1 + 2 + 3 + 4 + 5 + 6)),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 3, 2 * (1 + 2 + 3 + 3 + 3 + 3)),
    ],
)
def test_attention_by_cudnn_counts_the_pairs_that_its_mask_leaves(
    target, mask, window, products_of_pairs
):
    # jax.nn.dot_product_attention's form: B=2, 4 heads, 6 queries and 8 keys of width 16.
    module = hlo_text.module(
        """
ENTRY main {
  q = bf16[2,6,4,16]{3,2,1,0} parameter(0)
  k = bf16[2,8,4,16]{3,2,1,0} parameter(1)
  v = bf16[2,8,4,16]{3,2,1,0} parameter(2)
  ROOT attention.1 = (bf16[2,4,6,16]{3,1,2,0}, u8[0]{0}) custom-call(q, k, v),
    custom_call_target="TARGET", backend_config={"cudnn_fmha_backend_config":{
      "intermediate_tensor_shape":{"dimensions":["2","4","6","8"]},"mask_type":"MASK",
      "sliding_window_length":WINDOW}}
}
""".replace("TARGET", target)
        .replace("MASK", mask)
        .replace("WINDOW", str(window))
    )
    (cost,) = hlo_cost.costs(module)
    assert cost.flops == 2 * 2 * 4 * 16 * products_of_pairs


@pytest.mark.parametrize(
    ("target", "widths_of_products"),
    [
        ("__cudnn$fmhaSoftmax", 24 + 16),
        ("__cudnn$fmhaSoftmaxBackward", 3 * 24 + 2 * 16),
    ],
)
def test_attention_whose_values_are_narrower_than_its_keys(target, widths_of_products):
    module = hlo_text.module(
        """
ENTRY main {
  q = bf16[2,6,4,24]{3,2,1,0} parameter(0)
  k = bf16[2,8,4,24]{3,2,1,0} parameter(1)
  v = bf16[2,8,4,16]{3,2,1,0} parameter(2)
  ROOT attention.1 = (bf16[2,4,6,16]{3,1,2,0}, u8[0]{0}) custom-call(q, k, v),
    custom_call_target="TARGET", backend_config={"cudnn_fmha_backend_config":{
      "intermediate_tensor_shape":{"dimensions":["2","4","6","8"]}}}
}
""".replace("TARGET", target)
    )
    (cost,) = hlo_cost.costs(module)
    assert cost.flops == 2 * 2 * 4 * 6 * 8 * widths_of_products


@pytest.mark.parametrize(
    ("operand", "attributes", "arithmetic"),
    [
        ("f32", "", "f32"),
        ("f32", ", operand_precision={high,high}", "f32 high"),
        ("f32", ", operand_precision={highest,highest}", "f32 highest"),
        ("bf16", ", operand_precision={highest,highest}", "bf16"),
        ("f16", "", "bf16"),
        ("f8e4m3fn", "", "fp8"),
        ("f4e2m1fn", "", "fp8"),
        ("s8", "", "int8"),
        ("s4", "", "int8"),
        ("s32", "", "int32"),
        ("f64", "", "f64"),
        ("f32", ", algorithm=dot_tf32_tf32_f32_x3", "tf32 x3"),
        ("f32", ", algorithm=dot_bf16_bf16_f32", "bf16"),
    ],
)
def test_a_products_arithmetic_follows_its_operands(operand, attributes, arithmetic):
    module = hlo_text.module(f"""
ENTRY main {{
  x = {operand}[4,8]{{1,0}} parameter(0)
  w = {operand}[8,2]{{1,0}} parameter(1)
  ROOT y = f32[4,2]{{1,0}} dot(x, w), lhs_contracting_dims={{1}},
    rhs_contracting_dims={{0}}{attributes}
}}
""")
    (cost,) = hlo_cost.costs(module)
    assert (cost.flops, cost.arithmetic) == (2 * 4 * 8 * 2, arithmetic)


@pytest.mark.parametrize(("dtype", "real_products"), [("f32", 1), ("c64", 4)])
def test_complex_numbers_need_four_real_products(dtype, real_products):
    module = hlo_text.module(
        """
ENTRY main {
  x = T[2,9,4]{2,1,0} parameter(0)
  w = T[3,4,8]{2,1,0} parameter(1)
  a = T[6,6]{1,0} parameter(2)
  b = T[6,5]{1,0} parameter(3)
  convolved = T[2,7,8]{2,1,0} convolution(x, w), window={size=3}, dim_labels=b0f_0io->b0f
  factor = T[6,6]{1,0} cholesky(a), lower=true
  solved = T[6,5]{1,0} triangular-solve(factor, b), left_side=true, lower=true,
    transpose_a=NO_TRANSPOSE
  ROOT all = (T[2,7,8]{2,1,0}, T[6,5]{1,0}) tuple(convolved, solved)
}
""".replace("T[", f"{dtype}[")
    )
    flops = {cost.name: cost.flops for cost in hlo_cost.costs(module)}
    assert flops == {
        "convolved": real_products * 2 * 2 * 7 * 3 * 4 * 8,
        "factor": real_products * 6**3 // 3,
        "solved": real_products * 6 * 6 * 5,
    }


def test_a_batch_of_very_many_products_counts_at_once():
    # The TPU compiler's form of jnp.einsum("bij,bjk->bik", x, w).
    module = hlo_text.module("""
ENTRY main {
  x = bf16[1000000,16,8]{2,1,0} parameter(0)
  w = bf16[1000000,8,4]{2,1,0} parameter(1)
  ROOT y = bf16[1000000,16,4]{2,1,0} convolution(x, w),
    window={size=1000000 stride=999999 lhs_dilate=1000000}, dim_labels=0bf_0io->0bf
}
""")
    (cost,) = hlo_cost.costs(module)
    assert (cost.flops, cost.pair_flops) == (2 * 10**6 * 16 * 8 * 4, 2 * 16 * 8 * 4)


@pytest.mark.parametrize(
    ("window", "size", "pairs"),
    [
        ("size=4 stride=3 lhs_dilate=4", 4, 4),  # A batch of four products.
        ("size=4 pad=2_2 lhs_dilate=2", 8, 1),  # The gradient of a convolution with stride 2.
    ],
)
def test_a_convolution_over_a_dilated_image_is_one_product(window, size, pairs):
    module = hlo_text.module(f"""
ENTRY main {{
  x = bf16[4,16,8]{{2,1,0}} parameter(0)
  w = bf16[4,8,4]{{2,1,0}} parameter(1)
  ROOT y = bf16[{size},16,4]{{2,1,0}} convolution(x, w), window={{{window}}},
    dim_labels=0bf_0io->0bf
}}
""")
    assert products.num_pairs(module.entry.root) == pairs
