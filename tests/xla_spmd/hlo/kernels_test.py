"""Mosaic kernels, in libtpu's form of Pallas kernels: one with a cost, one without."""

import pytest

from tests.xla_spmd.hlo import hlo_text
from xla_spmd.hlo import hlo_cost, kernels, products

_M, _K, _N = 512, 256, 384
_FLOPS = 2 * _M * _K * _N
_BYTES = 4 * (_M * _K + _K * _N + _M * _N)
_COST = f'"cost_estimate": {{"flops": "{_FLOPS}", "bytes_accessed": "{_BYTES}"}}, '
_KERNELS = """
ENTRY main {
  x = f32[512,256]{1,0:T(8,128)} parameter(0)
  w = f32[256,384]{1,0:T(8,128)} parameter(1)
  my_product.1 = f32[512,384]{1,0:T(8,128)} custom-call(x, w), custom_call_target="tpu_custom_call",
    metadata={op_name="jit(f)/layer/my_product/pallas_call"},
    backend_config={"custom_call_config": {COST"body": "TUzvUg=="}}
  ROOT softmax.2 = f32[512,384]{1,0:T(8,128)} custom-call(my_product.1),
    custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/layer/softmax/pallas_call"},
    backend_config={"custom_call_config": {"body": "TUzvUg=="}}
}
"""


def _module(cost=_COST):
    return hlo_text.module(_KERNELS.replace("COST", cost))


def _flops(module, **kernel_flops):
    return {cost.name: cost.flops for cost in hlo_cost.costs(module, kernel_flops)}


def test_a_kernels_own_estimate_gives_its_flops():
    product, softmax = hlo_cost.costs(_module())
    assert (product.flops, product.accessed_bytes) == (_FLOPS, _BYTES)
    assert product.op_name == "jit(f)/layer/my_product/pallas_call"
    assert (softmax.flops, softmax.accessed_bytes) == (0, 4 * 2 * _M * _N)


# A kernel of two matrices and a third operand.
_THREE = """
ENTRY main {
  x = bf16[512,256]{1,0} parameter(0)
  w = bf16[256,384]{1,0} parameter(1)
  third = DTYPE[SHAPE]{1,0} parameter(2)
  ROOT attend.1 = bf16[512,384]{1,0} custom-call(x, w, third),
    custom_call_target="tpu_custom_call", backend_config={"custom_call_config": {COST}}
}
"""


@pytest.mark.parametrize(
    ("dtype", "shape", "arithmetic"),
    [("s8", "4,4", "bf16"), ("s8", "512,256", "int8"), ("f32", "512,256", "bf16")],
)
def test_the_fastest_dtype_of_a_kernels_large_operands_counts(dtype, shape, arithmetic):
    """Splash attention, for one, reads which blocks its mask leaves as int8."""
    text = _THREE.replace("DTYPE", dtype).replace("SHAPE", shape)
    module = hlo_text.module(text.replace("COST", _COST.removesuffix(", ")))
    (kernel,) = hlo_cost.costs(module)
    assert kernel.arithmetic == arithmetic


def test_flops_that_the_user_gives_come_first():
    found = _flops(_module(), softmax=7, my_product=11)
    assert found == {"my_product.1": 11, "softmax.2": 7}


def test_kernels_without_flops_are_named():
    assert products.uncounted(_module(), {}) == ("softmax",)
    assert products.uncounted(_module(cost=""), {}) == ("my_product", "softmax")
    assert products.uncounted(_module(cost=""), {"softmax": 0}) == ("my_product",)
    assert products.uncounted(hlo_text.module("ENTRY e { ROOT x = f32[] parameter(0) }"), {}) == ()


def test_a_kernel_without_a_scope_has_its_instructions_name():
    unnamed = _KERNELS.replace("COST", "").replace("layer/softmax/pallas_call", "run")
    module = hlo_text.module(unnamed.replace("jit(f)/", ""))
    assert products.uncounted(module, {}) == ("my_product", "softmax")


def test_a_kernel_without_a_name_gets_its_function_s():
    for scope in ("jit(softmax)", "transpose(jvp(softmax))"):
        module = hlo_text.module(_KERNELS.replace("COST", _COST).replace("layer/softmax", scope))
        assert products.uncounted(module, {}) == ("softmax",)


def test_flops_by_name():
    assert kernels.parse_flops(["flash=8.6e9", "a:b=0"]) == {"flash": 8_600_000_000, "a:b": 0}


@pytest.mark.parametrize("text", ["flash", "flash=many", "flash=-1"])
def test_another_form_is_refused(text):
    with pytest.raises(ValueError, match=f"flops of a kernel '{text}': expected NAME=FLOPS"):
        kernels.parse_flops([text])


def test_a_name_given_twice_or_of_no_kernel_is_refused():
    with pytest.raises(ValueError, match="'a=2': a was given before"):
        kernels.parse_flops(["a=1", "a=2"])
    kernels.check_names(_module(), {"softmax": 1})
    with pytest.raises(ValueError, match="'flash': the program's kernels are: my_product, softm"):
        kernels.check_names(_module(), {"flash": 1})


def test_a_kernel_of_triton_has_only_user_given_flops():
    # Its configuration is not JSON.
    module = hlo_text.module("""
ENTRY main {
  x = bf16[256,64]{1,0} parameter(0)
  ROOT call.1 = bf16[256,64]{1,0} custom-call(x), custom_call_target="__gpu$xla.gpu.triton",
    metadata={op_name="jit(f)/jit(mha)/mha_forward/pallas_call"},
    backend_config="{grid_x = 8 : i32}"
}
""")
    assert products.uncounted(module, {}) == ("mha_forward",)
    assert _flops(module, mha_forward=5) == {"call.1": 5}
    assert hlo_cost.costs(module)[0].accessed_bytes == 2 * 2 * 256 * 64
