"""From operations' names to Figure 8's categories."""

import pytest

from lingvo_gshard.planning.compiled.categories import (
    Category,
    Pass,
    category,
    is_recomputed,
    pass_of,
    scopes,
    source,
)

_PREFIX = "jit(call)/call_exported/jit(flat)/call_tf/"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder/layers_1/feed_forward/experts/einsum/Einsum", Category.EXPERTS),
        ("encoder/layers_0/feed_forward/project_1/MatMul", Category.FEED_FORWARD),
        ("decoder/layers_0/source_attention/project/MatMul", Category.PROJECTION),
        ("decoder/layers_0/project_3/MatMul", Category.PROJECTION),
        ("decoder/layers_0/source_attention/logits/Einsum", Category.ATTENTION),
        ("decoder/layers_0/self_attention/Softmax", Category.ATTENTION),
        ("encoder/layers_1/feed_forward/gate/Cumsum", Category.GATE_CUMSUM),
        ("gradient_tape/encoder/layers_1/feed_forward/gate/Cumsum_1", Category.GATE_CUMSUM),
        ("encoder/layers_1/feed_forward/gate/ArgMax", Category.GATE),
        ("encoder/layers_1/feed_forward/gate_1/project/MatMul", Category.GATE_PROJECTION),
        ("gradient_tape/encoder/layers_1/feed_forward/combine/Einsum_1", Category.DISPATCH),
        ("softmax/project/MatMul", Category.SOFTMAX),
        ("softmax_1/Sum", Category.SOFTMAX),
        ("optimizer/sub_156", Category.OPTIMIZER),
        ("encoder/layers_1/feed_forward_norm/mul", Category.OTHER),
        ("UnsortedSegmentSum", Category.OTHER),
        ("", Category.OTHER),
    ],
)
def test_the_scope_decides_the_category(name, expected):
    assert category(_PREFIX + name) is expected
    assert category(f"{_PREFIX}PartitionedCall/{name}") is expected
    assert category(f"{_PREFIX}while/body/{name};PartitionedCall/optimizer/x") is expected


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
def test_what_the_gradient_repeats_is_told_apart_from_its_gradient(name, expected):
    assert is_recomputed(_PREFIX + name) is expected
    # Its layer and category are those of the forward pass.
    forward = name.replace("recomputed/", "")
    assert source(_PREFIX + name) == source(_PREFIX + forward)
    assert category(_PREFIX + name) is category(_PREFIX + forward)


def test_scopes_leave_out_what_frameworks_add():
    assert scopes(_PREFIX + "gradient_tape/while/gradients/encoder/call.2/norm/mul_3;x/y") == (
        *("encoder", "norm", "mul_3"),
    )


def test_the_source_is_the_layer():
    name = _PREFIX + "gradient_tape/encoder/layers_1/feed_forward/dispatch/Einsum_1"
    assert source(name) == "encoder/layers_1/feed_forward/dispatch"
    assert source(_PREFIX + "add_3") == "add_3" and source("") == "unnamed"


def test_the_source_of_what_was_combined_is_the_first_layer():
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
def test_passes_of_jax_are_told_apart_and_their_layer_named_alike(name, expected):
    assert pass_of(f"jit(step)/{name}") is expected
    assert source(f"jit(step)/{name}") == "stack/mlp"
