"""The scopes in operations' names."""

import pytest

from xla_plan.cost.scopes import Pass, is_attention_kernel, is_recomputed, pass_of, scopes, source
from xla_spmd.hlo.hlo_cost import Cost

_PREFIX = "jit(call)/call_exported/jit(flat)/call_tf/"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("recomputed/encoder/layers_1/feed_forward/experts/einsum/Einsum", True),
        ("while/body/recomputed/decoder/block_0/norm/mul", True),
        ("while/body/gradient_tape/recomputed/encoder/block_1/feed_forward/combine/Einsum", False),
        ("gradient_tape/while/gradients/recomputed/encoder/block_0/norm/mul", False),
        ("while/body/encoder/block_0/norm/mul", False),
        ("optimizer/mul;recomputed/encoder/layers_0/norm/mul", False),
        ("", False),
    ],
)
def test_recomputation_is_distinguished_from_the_gradient(name, expected):
    assert is_recomputed(_PREFIX + name) is expected
    # Its layer and category are the forward pass's.
    forward = name.replace("recomputed/", "")
    assert source(_PREFIX + name) == source(_PREFIX + forward)
    assert scopes(_PREFIX + name) == scopes(_PREFIX + forward)


def test_scopes_leave_out_names_that_frameworks_add():
    assert scopes(_PREFIX + "gradient_tape/while/gradients/encoder/call.2/norm/mul_3;x/y") == (
        *("encoder", "norm", "mul_3"),
    )


def test_the_source_is_the_layer():
    name = _PREFIX + "gradient_tape/encoder/layers_1/feed_forward/dispatch/Einsum_1"
    assert source(name) == "encoder/layers_1/feed_forward/dispatch"
    assert source(_PREFIX + "add_3") == "add_3" and source("") == "unnamed"


def test_a_combined_collective_has_the_source_of_its_first_layer():
    name = _PREFIX + "decoder/(block_0/add/Sum:block_1/norm/Sum:block_2/add/Sum)"
    assert source(name) == "decoder/block_0/add and others"
    assert source(_PREFIX + "(Sum_6:optimizer/Sum_5)") == "Sum_6 and others"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jvp(stack)/while/body/checkpoint/mlp/dot_general", Pass.FORWARD),
        ("jvp()/while/body/closed_call/stack/mlp/dot_general", Pass.FORWARD),
        ("vmap(stack)/shard_map/mlp/dot_general", Pass.FORWARD),
        ("transpose(jvp(stack))/while/body/checkpoint/mlp/dot_general", Pass.BACKWARD),
        (
            "transpose(jvp(stack))/while/body/checkpoint/rematted_computation/mlp/dot_general",
            Pass.RECOMPUTED,
        ),
        (
            "transpose(jvp(stack))/checkpoint/rematted_computation/transpose(jvp(mlp))/dot_general",
            Pass.BACKWARD,
        ),
        ("stack/mlp/transpose", Pass.FORWARD),
    ],
)
def test_passes_of_jax_are_distinguished_and_share_a_layers_name(name, expected):
    assert pass_of(f"jit(step)/{name}") is expected
    assert source(f"jit(step)/{name}") == "stack/mlp"


@pytest.mark.parametrize(
    ("op_name", "opcode", "flops", "attends"),
    [
        ("jit(f)/attention/mha_forward/pallas_call", "custom-call", 5, True),
        ("jit(f)/transpose(jvp(layer))/splash_mha_dq/pallas_call", "custom-call", 5, True),
        ("jit(f)/layer/dot_product_attention_fwd", "custom-call", 5, True),
        # A product by cuBLAS, and a kernel that multiplies experts' rows.
        ("jit(f)/attention/query/dot_general", "custom-call", 5, False),
        ("jit(f)/attention/gmm/pallas_call", "custom-call", 5, False),
        ("jit(f)/mha_preprocess_backward/pallas_call", "custom-call", 0, False),
        ("jit(f)/attention/dot_general", "fusion", 5, False),
    ],
)
def test_kernels_of_attention_are_known_by_their_own_names(op_name, opcode, flops, attends):
    cost = Cost("a.1", opcode, op_name, flops, 8, (), 1)
    assert is_attention_kernel(cost) == attends
