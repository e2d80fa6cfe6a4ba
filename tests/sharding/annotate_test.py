"""The annotation API: results do not change, and parts are placed by the annotation."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import annotations, lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests import exhaustive
from tests.spmd import functions
from tests.xla_spmd import compilers
from xla_spmd.mesh import Mesh

_ORDER = (3, 1, 0, 2, 7, 5, 6, 4)
_EIGHT = Partitioning(Mesh(("x", "y"), (2, 4), _ORDER), ())
_GRID = Partitioning(Mesh.flat(8), ())

# The annotation of the [8, 16, 24] product of a [8, 16, 5] and a [5, 24] tensor.
_ANNOTATIONS = {
    "replicate": annotate.replicate,
    "split first": lambda t: annotate.split(t, 0, 8),
    "shard, permuted": lambda t: annotate.shard(t, np.array(_ORDER).reshape(1, 2, 4)),
    "mesh": lambda t: annotate.mesh_split(t, _EIGHT.mesh, ("x", None, "y")),
    "mesh, transposed": lambda t: annotate.mesh_split(t, _EIGHT.mesh, ("y", "x", None)),
    "uneven": lambda t: annotate.split(t[:, :15], 1, 8),
    "4 of 8": lambda t: annotate.split(t, 1, 4),
    "2 of 8": lambda t: annotate.split(t, -1, 2),
    "shard, 4 of 8": lambda t: annotate.shard(t, np.array([3, 1, 0, 2]).reshape(2, 1, 2)),
}
_LOCAL = {  # The shape of one partition's part.
    "replicate": (8, 16, 24),
    "split first": (1, 16, 24),
    "shard, permuted": (8, 8, 6),
    "mesh": (4, 16, 6),
    "mesh, transposed": (2, 8, 24),
    "uneven": (8, 2, 24),
    "4 of 8": (8, 4, 24),
    "2 of 8": (8, 16, 12),
    "shard, 4 of 8": (4, 16, 12),
}


def _fn(how):
    def fn(batch):
        leaves = batch.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            y = how(tf.einsum("abc,cd->abd", batch.x, batch.w))
            loss = tf.reduce_sum(tf.square(y))
        d_w, d_x = tape.gradient(loss, leaves)
        return NestedMap(loss=loss, y=y, d_w=d_w, d_x=d_x)

    specs = NestedMap(x=functions.f32((8, 16, 5), "___"), w=functions.f32((5, 24), "__"))
    return AnnotatedFn("annotated", fn, ("batch",), (specs,))


@pytest.mark.parametrize("name", _ANNOTATIONS)
def test_partitioned_equals_numpy(name):
    fn = _fn(_ANNOTATIONS[name])
    executable = compile_program(lowering.export(fn, _EIGHT))
    batch = functions.randoms(fn.args[0], 1)
    got = executable(batch)
    y = np.einsum("abc,cd->abd", batch.x, batch.w)
    d_y = 2 * y
    if name == "uneven":
        y = y[:, :15]
        d_y[:, 15:] = 0
    np.testing.assert_allclose(got.y, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.loss, (y**2).sum(), rtol=1e-4)
    np.testing.assert_allclose(
        got.d_x, np.einsum("abd,cd->abc", d_y, batch.w), rtol=1e-3, atol=1e-3
    )
    np.testing.assert_allclose(
        got.d_w, np.einsum("abd,abc->cd", d_y, batch.x), rtol=1e-3, atol=1e-3
    )
    # The compiled program holds tensors of a part's shape.
    assert str(list(_LOCAL[name])).replace(" ", "") in executable.compiled.as_text()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda t: annotate.split(t, 0, 16),
            r"split: mul:0 of shape \(8, 6\) has 16 slices, .* 8 devices; expected at most 8",
        ),
        (lambda t: annotate.shard(t, [[0, 2, 1]]), "shard: mul:0 .* has 3 slices"),
        (
            lambda t: annotate.mesh_split(t, Mesh.flat(4), ("d", None)),
            r"mesh_split: mul:0 .* has 4 devices, but the program has 8; expected a mesh of 8",
        ),
    ],
)
def test_slices_that_do_not_fit_the_devices_are_refused(how, message):
    args = (NestedMap(x=functions.f32((8, 6), "__")),)
    fn = AnnotatedFn("f", lambda batch: NestedMap(y=how(2.0 * batch.x)), ("batch",), args)
    with pytest.raises(ValueError, match=message):
        lowering.export(fn, _GRID)


@pytest.mark.parametrize(("asked", "slices", "shard_shape"), [(3, "y", (2, 5)), (5, "x+y", (1, 5))])
def test_a_split_by_a_number_that_does_not_divide_the_devices(asked, slices, shard_shape):
    """Each device holds at most as much as with the requested number of slices."""
    args = (NestedMap(x=functions.f32((7, 5), "__")),)
    fn = AnnotatedFn(
        "f",
        lambda batch: NestedMap(y=tf.exp(annotate.split(2.0 * batch.x, 0, asked))),
        ("b",),
        args,
    )
    *_, inside = annotations.describe(fn, _EIGHT).tensors
    assert (inside.sharding, inside.shard_shape) == (f"{slices},-", shard_shape)
    batch = functions.randoms(args[0], 1)
    got = compile_program(lowering.export(fn, _EIGHT))(batch)
    np.testing.assert_allclose(got.y, np.exp(2 * batch.x), rtol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_slices_of_any_number_of_devices(num_slices, num_devices):
    fn = _fn(lambda t: annotate.split(t, 1, num_slices))
    parts = Partitioning(Mesh.flat(num_devices), ())
    if num_slices > num_devices:
        with pytest.raises(ValueError, match=f"has {num_slices} slices, .* {num_devices} devices"):
            lowering.export(fn, parts)
        return

    batch = functions.randoms(fn.args[0], 1)
    y = compile_program(lowering.export(fn, parts))(batch).y
    np.testing.assert_allclose(y, batch.x @ batch.w, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("topology_name", ["v3:2x2", "h100:1x8"])
@pytest.mark.parametrize("name", ["4 of 8", *exhaustive.only("2 of 8", "shard, 4 of 8")])
def test_few_slices_compile_for_tpus_and_gpus(topology_name, name):
    compilers.need(topology_name)
    program = lowering.export(_fn(_ANNOTATIONS[name]), _GRID)
    text = topology_executable.compile_program(program, topology_name).compiled.as_text()
    assert str(list(_LOCAL[name])).replace(" ", "") in text


@pytest.mark.parametrize("dims", ["HB_", "_BH", "___"])
def test_parts_are_placed_like_arguments_of_the_same_dims(dims):
    """Otherwise the partitioner would have to move the parts from device to device."""
    parts = Partitioning.from_dict(_EIGHT.mesh, {"B": "x", "H": "y"})
    fn = AnnotatedFn(
        "twice",
        lambda batch: NestedMap(y=Annotator(parts).annotate(batch.x * 2.0, dims)),
        ("batch",),
        (NestedMap(x=functions.f32((8, 16, 24), dims)),),
        {"y": dims},
    )
    executable = compile_program(lowering.export(fn, parts))
    assert sum(count for _, count in executable.report().collectives) == 0
    y = executable(functions.randoms(fn.args[0], 1)).y
    assert y.addressable_shards[0].data.shape == parts.shard_shape(fn.args[0].x)


@pytest.mark.parametrize("assignment", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]]])
def test_device_assignments_change_the_groups_of_collectives(assignment):
    """Figure 10: 2x4 parts that communicate along the rows."""

    def fn(batch):
        parts = annotate.shard(tf.square(batch.x), assignment)
        return NestedMap(y=tf.reduce_sum(parts, 1))

    args = (NestedMap(x=functions.f32((6, 12), "__")),)
    executable = compile_program(lowering.export(AnnotatedFn("rows", fn, ("batch",), args), _GRID))
    batch = functions.randoms(args[0], 1)
    np.testing.assert_allclose(executable(batch).y, (batch.x**2).sum(1), rtol=1e-5)
    (reduced,) = (c for c in executable.report().collective_ops if c.kind == "all-reduce")
    assert {frozenset(group) for group in reduced.groups} == {frozenset(row) for row in assignment}


@pytest.fixture
def graph_tensor():
    with tf.Graph().as_default():
        yield tf.zeros([3, 16, 64], name="states")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda t: annotate.split(t, 3, 2), r"dimension 3 of states.* expected -3 to 2"),
        (lambda t: annotate.split(t, -4, 2), "dimension -4 of states"),
        (lambda t: annotate.split(t, 0, 0), "num_partitions must be 1 or more, got 0"),
        (lambda t: annotate.shard(t, [[0, 1]]), r"rank 3, but the device assignment.* rank 2"),
        (lambda t: annotate.shard(t, [[[0, 2]]]), r"must hold 0 to 1 once each, got \[0, 2\]"),
        (lambda t: annotate.shard(t, [[[1, 1]]]), r"must hold 0 to 1 once each, got \[1, 1\]"),
        (
            lambda t: annotate.mesh_split(t, Mesh.flat(2), ("d", None)),
            "states.* rank 3, but 2 axes",
        ),
        (
            lambda t: annotate.mesh_split(t, Mesh.flat(2), ("d", "d", None)),
            r"states:0 of shape \(3, 16, 64\): an axis is used twice, 'd'.* the axes are d of 2",
        ),
        (
            lambda t: annotate.mesh_split(t, Mesh.flat(2), ("e", None, None)),
            r"mesh_split: states:0 of shape \(3, 16, 64\): no axis 'e' .* the axes are d of 2",
        ),
    ],
)
def test_invalid_annotations_are_refused(graph_tensor, use, message):
    with pytest.raises(ValueError, match=message):
        use(graph_tensor)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("replicate", annotate.replicate),
        ("split", lambda t: annotate.split(t, 0, 2)),
        ("shard", lambda t: annotate.shard(t, [[0], [1]])),
        ("mesh_split", lambda t: annotate.mesh_split(t, Mesh.flat(2), ("d", None))),
        ("annotate", lambda t: Annotator(_EIGHT).annotate(t, "BM")),
    ],
)
def test_a_value_has_no_partitions(name, use):
    message = rf"{name}: a tensor inside a tf.function is expected, got a value of shape \(4, 6\)"
    with pytest.raises(ValueError, match=message):
        use(tf.zeros([4, 6]))


def test_an_unknown_rank_cannot_be_split():
    with tf.Graph().as_default():
        unknown = tf.compat.v1.placeholder(tf.float32, None, name="unknown")
        with pytest.raises(ValueError, match="split: unknown:0 has no static rank"):
            annotate.split(unknown, 0, 2)
