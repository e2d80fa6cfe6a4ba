"""2-D products: activations [B:x, L, M:y] times weights [M:x, H:y], in blocks of the mesh.

A product gathers its activations along a row of the mesh and its weight along a column, and a sum
over a split dim stays within a row or a column ("An Efficient 2D Method for Training Super-Large
Deep Learning Models").
"""

import functools
import re

import pytest
import tensorflow as tf

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building
from tests.spmd import functions
from tests.xla_spmd import compilers
from xla_spmd.mesh import Mesh

_PARTS = Partitioning.parse(Mesh(("x", "y"), (4, 2)), "B:x,M:y,weights.M:x,H:y")
_ROW = (0, 1)  # The partitions that differ along y alone.
_COLUMN = (0, 2, 4, 6)
B, L, M, H = 16, 32, 64, 256
_X_BYTES = B * L * M * 4
_WEIGHT_BYTES = M * H * 4
_COMPILERS = [
    "cpu",
    pytest.param("v3:2x2", marks=pytest.mark.slow),
    pytest.param("h100:1x8", marks=pytest.mark.slow),
]
_LOOKUP = re.compile("embedding|UnsortedSegmentSum")
_KINDS = {"all-gather": "gather", "all-reduce": "sum", "reduce-scatter": "sum"}


def _compiled(program, name):
    if name == "cpu":
        return compile_program(program)
    compilers.need(name)
    return topology_executable.compile_program(program, name)


@functools.cache
def _layer():
    p = FeedForwardLayer.Params().Set(dim=M, hidden_dim=H)
    return p.Instantiate(Annotator(_PARTS), "layer")


def _step(theta: NestedMap, batch: NestedMap) -> NestedMap:
    """Returns the gradients of weights and input."""
    leaves = [*theta.Flatten(), batch.x]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        y = _layer().FProp(theta, batch.x, Context(Mode.EVAL))
        loss = tf.reduce_sum(y * batch.out)
    *d_theta, d_x = tape.gradient(loss, leaves)
    return NestedMap(d_theta=theta.Pack(d_theta), d_x=d_x)


@pytest.mark.parametrize("name", _COMPILERS)
def test_a_product_gathers_a_row_of_activations_and_a_column_of_weights(name):
    theta = building.theta_specs(_layer())
    x_BLM = functions.f32((B, L, M), "BLM")
    dims = building.dims_of(d_theta=theta) | {"d_x": "BLM"}
    args = (theta, NestedMap(x=x_BLM, out=x_BLM))
    program = lowering.export(AnnotatedFn("step", _step, ("theta", "batch"), args, dims), _PARTS)
    report = _compiled(program, name).report()

    # Activations along rows: x for wi, and the output's gradient for wo; weights along columns. A
    # compiler may send 16 bits, gather two tensors at once, or one again for its second use.
    gathered = {_ROW: 0, _COLUMN: 0}
    summed = set()
    for op in report.collective_ops:
        if _KINDS[op.kind] == "gather":
            gathered[op.groups[0]] += op.result_bytes
        else:
            summed.add(op.groups[0])
    assert 2 * _X_BYTES / 4 / 2 <= gathered[_ROW] <= 2 * _X_BYTES / 4
    assert 2 * _WEIGHT_BYTES / 2 / 2 <= gathered[_COLUMN] <= 2 * 2 * _WEIGHT_BYTES / 2

    # The input's gradient is summed along rows, the weights' along columns.
    assert summed == {_ROW, _COLUMN}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", *exhaustive.only("v3:2x2", "h100:1x8")])
@pytest.mark.parametrize(
    "model", [pytest.param("toy.Dense4L", marks=pytest.mark.exhaustive), "toy.MoE8E4L"]
)
def test_a_whole_model_sends_large_tensors_only_along_a_row_or_a_column(name, model):
    settings = ("mesh=x:4,y:2", "sharding=BGE:x,M:y,weights.M:x,HNV:y")
    sizes = ("task.source_vocab_size=512", "task.target_vocab_size=256")
    params = registry.get_params(model, (*settings, *sizes))
    parts = placement.partitioning(params, 8)

    p = params.input
    batch = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    program = Programs(TaskModel(params, parts), in_process=True).exported(Mode.TRAIN, batch)
    report = _compiled(program, name).report()

    # Statistics of a batch are as long as its tokens, and no longer. Lookups are not products.
    num_tokens = p.batch_size * p.source_len
    large = [
        op
        for op in report.collective_ops
        if op.result_bytes > 4 * num_tokens and not _LOOKUP.search(op.op_name)
    ]
    for op in large:
        assert all(_in_line(group) for group in op.groups), op
    sent = {(_KINDS.get(op.kind), op.groups[0]) for op in large}
    assert {(kind, line) for kind in ("gather", "sum") for line in (_ROW, _COLUMN)} <= sent

    # Tokens go to the experts and back along a column, forward and backward.
    exchanged = [op for op in large if op.kind == "all-to-all" and "feed_forward" in op.op_name]
    num_moe_layers = 0 if model == "toy.Dense4L" else 2
    assert len(exchanged) >= 4 * num_moe_layers
    assert {op.groups[0] for op in exchanged} <= {_COLUMN}


def _in_line(partitions):
    """Whether these partitions of the mesh are all in one row, or all in one column."""
    rows = {partition // 2 for partition in partitions}
    columns = {partition % 2 for partition in partitions}
    return len(rows) == 1 or len(columns) == 1
