"""From operations' names to Figure 8's categories."""

import pytest

from lingvo_gshard.plans.categories import Category, category

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
