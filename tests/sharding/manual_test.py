"""Manual partitioning: local code between the two conversions has right values and gradients."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate, manual
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from xla_spmd.mesh import Mesh

_GRID = Partitioning.from_dict(
    Mesh(("x", "y"), (2, 4), (3, 1, 0, 2, 7, 5, 6, 4)), {"B": "x", "H": "y"}
)
_MESH = _GRID.mesh.grid
# The dispatch of section 3.2: 8 groups of 7 tokens to 5 experts with room for 3 tokens per group.
_G, _S, _E, _C, _M = 8, 7, 5, 3, 6


def _gather_dispatch(parts, x_GSM, indices_EGC):
    """The paper's pseudocode: a local Gather replaces the one-hot einsum."""

    def local(part_GSM, part_EGC):
        local_G = tf.range(part_EGC.shape[1])[None, :, None]
        gs_EGC2 = tf.stack([tf.broadcast_to(local_G, part_EGC.shape), part_EGC], axis=-1)
        return tf.gather_nd(part_GSM, gs_EGC2)

    arguments = [(x_GSM, "GSM"), (indices_EGC, "_GC")]
    return Annotator(parts).locally(local, arguments, "_GCM")


def _dispatch_fn(parts):
    def fn(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch.x_GSM)
            y_EGCM = _gather_dispatch(parts, batch.x_GSM, batch.indices_EGC)
            weighted = tf.reduce_sum(y_EGCM * batch.weights_EGCM, axis=[0, 2, 3])
        return NestedMap(y_EGCM=y_EGCM, d_x_GSM=tape.gradient(weighted, batch.x_GSM))

    specs = NestedMap(
        x_GSM=functions.f32((_G, _S, _M), "GSM"),
        indices_EGC=TensorSpec((_E, _G, _C), "int32", "_G_"),
        weights_EGCM=functions.f32((_E, _G, _C, _M), "_G__"),
    )
    return AnnotatedFn("dispatch", fn, ("batch",), (specs,), {"y_EGCM": "_G__", "d_x_GSM": "GSM"})


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_the_papers_dispatch_by_a_local_gather(num_partitions):
    rng = np.random.default_rng(1)
    batch = NestedMap(
        x_GSM=rng.standard_normal((_G, _S, _M)).astype("f"),
        indices_EGC=rng.integers(0, _S, (_E, _G, _C)).astype("i"),
        weights_EGCM=rng.standard_normal((_E, _G, _C, _M)).astype("f"),
    )
    parts = functions.partitioning(num_partitions)
    executable = compile_program(lowering.export(_dispatch_fn(parts), parts))
    got = executable(batch)
    mask_GSEC = np.eye(_S)[batch.indices_EGC].transpose(1, 3, 0, 2)
    np.testing.assert_allclose(
        got.y_EGCM, np.einsum("gsec,gsm->egcm", mask_GSEC, batch.x_GSM), rtol=1e-6
    )
    np.testing.assert_allclose(
        got.d_x_GSM,
        np.einsum("gsec,egcm->gsm", mask_GSEC, batch.weights_EGCM),
        rtol=1e-5,
        atol=1e-6,
    )
    assert sum(count for _, count in executable.report().collectives) == 0


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_each_partition_has_its_own_number_of_iterations(num_partitions):
    parts = functions.partitioning(num_partitions)

    def local(times_G, x_GM):
        def body(times, x_GM):
            return times - 1, x_GM + tf.reduce_sum(x_GM)

        times = tf.gather(times_G, 0)
        return tf.while_loop(lambda times, _: times > 0, body, [times, x_GM])[1]

    def fn(batch):
        y_GM = Annotator(parts).locally(local, [(batch.times_G, "G"), (batch.x_GM, "GM")], "GM")
        return NestedMap(y_GM=y_GM)

    specs = NestedMap(times_G=TensorSpec((8,), "int32", "G"), x_GM=functions.f32((8, 3), "GM"))
    annotated = AnnotatedFn("loops", fn, ("batch",), (specs,), {"y_GM": "GM"})
    executable = compile_program(lowering.export(annotated, parts))
    batch = functions.randoms(NestedMap(x_GM=specs.x_GM), 3)
    batch.times_G = np.array([3, 0, 1, 4, 2, 5, 0, 1], np.int32)
    got = executable(batch).y_GM
    want = batch.x_GM.reshape(num_partitions, -1, 3).copy()
    for part, times in zip(want, batch.times_G[:: 8 // num_partitions], strict=True):
        for _ in range(times):
            part += part.sum()
    np.testing.assert_allclose(got, want.reshape(8, 3), rtol=1e-4)
    assert sum(count for _, count in executable.report().collectives) == 0


def _loss_and_gradients(batch, results):
    with tf.GradientTape() as tape:
        leaves = batch.Flatten()
        tape.watch(leaves)
        y, same, rows = results(batch)
        loss = tf.reduce_sum(y * y) + tf.reduce_sum(same**3) + tf.reduce_sum(rows**2)
    d = batch.Pack(tape.gradient(loss, leaves))
    return NestedMap(y=y, same=same, rows=rows, loss=loss, d=d)


def _check_equal(parts, specs, results, unpartitioned):
    """Asserts that results and gradients equal the unpartitioned ones."""

    def fn(batch):
        return _loss_and_gradients(batch, results)

    batch = functions.randoms(specs, 3)
    got = compile_program(lowering.export(AnnotatedFn("manual", fn, ("batch",), (specs,)), parts))(
        batch
    )
    want = _loss_and_gradients(batch.Transform(tf.constant), unpartitioned)
    for (path, a), b in zip(got.FlattenItems(), want.Flatten(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=path)


def _manually(batch):
    """Returns a product summed over H, scaled by a replicated value; a copy; and partial rows."""
    enter, leave = manual.auto_to_manual_spmd_partition, manual.manual_to_auto_spmd_partition
    x_BH, w_HM = enter(batch.x_BH, _MESH, ("x", "y")), enter(batch.w_HM, _MESH, ("y", None))
    scale_M = enter(batch.scale_M, _MESH, (None,))
    y_BM = tf.einsum("bm,m->bm", x_BH @ w_HM, tf.sin(scale_M))
    rows_BH = tf.ones([1, x_BH.shape[0]]) @ x_BH
    return (
        tf.reduce_sum(leave(tf.expand_dims(y_BM, 0), _MESH, ("y", "x", None)), 0),
        leave(tf.exp(scale_M), _MESH, (None,)),
        leave(rows_BH, _MESH, ("x", "y")),
    )


def _whole(batch):
    halves_2BH = tf.reshape(batch.x_BH, [2, -1, batch.x_BH.shape[1]])
    y_BM = tf.sin(batch.scale_M) * (batch.x_BH @ batch.w_HM)
    return y_BM, tf.exp(batch.scale_M), tf.reduce_sum(halves_2BH, 1)


def test_sums_copies_and_parts_leave_with_right_gradients():
    specs = NestedMap(
        x_BH=functions.f32((6, 12), "BH"),
        w_HM=functions.f32((12, 5), "HM"),
        scale_M=functions.f32((5,), "M"),
    )
    _check_equal(_GRID, specs, _manually, _whole)


@pytest.fixture
def graph_tensor():
    with tf.Graph().as_default():
        yield tf.zeros([4, 6], name="states")


@pytest.mark.parametrize(
    "switch", [manual.auto_to_manual_spmd_partition, manual.manual_to_auto_spmd_partition]
)
@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("x",), r"spmd_partition: states:0 has shape \(4, 6\), rank 2, but 1 axes \('x',\)"),
        (("x", "z"), r"states:0 of shape \(4, 6\): no axis 'z' in .* the axes are x of 2, y of 4"),
        (("x", "x"), r"an axis is used twice, 'x' in \('x', 'x'\); the axes are x of 2, y of 4"),
    ],
)
def test_invalid_axes_are_refused(graph_tensor, switch, axes, message):
    with pytest.raises(ValueError, match=message):
        switch(graph_tensor, _MESH, axes)


def test_an_uneven_size_may_not_enter(graph_tensor):
    message = r"states:0 of shape \(4, 6\): dimension 1 of size 6 is not divisible by the 4 .* 'y'"
    with pytest.raises(ValueError, match=message):
        manual.auto_to_manual_spmd_partition(graph_tensor, _MESH, ("x", "y"))


def test_a_dynamic_shape_is_refused(graph_tensor):
    dynamic = tf.boolean_mask(graph_tensor, graph_tensor[:, 0] > 0)
    with pytest.raises(ValueError, match=r"has shape \(None, 6\); a static shape is expected"):
        manual.auto_to_manual_spmd_partition(dynamic, _MESH, ("x", None))
    with pytest.raises(ValueError, match=r"has shape \(None, 6\); a static shape is expected"):
        manual.manual_to_auto_spmd_partition(dynamic, _MESH, ("x", None))


@pytest.mark.parametrize("table", [{"G": "d"}, {"G": "y"}])
def test_reductions_pads_and_slices_may_stand_in_a_region(table):
    """Values and gradients equal one device's."""

    def local(part_GM):
        scaled_GM = tf.nn.softmax(part_GM) * tf.reduce_max(part_GM, 1, keepdims=True)
        padded = tf.pad(scaled_GM, [[0, 0], [1, 2]])[:, 1:-1]
        sums_GM = tf.concat([padded[:, ::2], tf.cumsum(padded, 1)[:, :2]], 1)
        return tf.reduce_mean(sums_GM, 1, keepdims=True) * part_GM

    def fn(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch.x_GM)
            y_GM = Annotator(parts).locally(local, [(batch.x_GM, "GM")], "GM")
            loss = tf.reduce_sum(tf.pad(y_GM, [[1, 0], [0, 1]]) ** 2)
        return NestedMap(y_GM=y_GM, d_x_GM=tape.gradient(loss, batch.x_GM))

    x_GM = np.random.default_rng(4).standard_normal((8, 6)).astype("f")
    mesh = Mesh.flat(8) if "d" in table.values() else Mesh(("x", "y"), (2, 4))
    parts = Partitioning.from_dict(mesh, table)
    specs = NestedMap(x_GM=functions.f32((8, 6), "GM"))
    annotated = AnnotatedFn("rows", fn, ("batch",), (specs,), {"y_GM": "GM", "d_x_GM": "GM"})
    got = compile_program(lowering.export(annotated, parts))(NestedMap(x_GM=x_GM))

    # TensorFlow itself, without partitions.
    with tf.GradientTape() as tape:
        x = tf.constant(x_GM)
        tape.watch(x)
        want = local(x)
        loss = tf.reduce_sum(want**2)
    np.testing.assert_allclose(got.y_GM, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.d_x_GM, tape.gradient(loss, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_partitions", [1, 8])
def test_a_loop_with_a_gradient_may_hold_a_region(num_partitions):
    """No part is carried from the loop to its gradient's loop."""
    parts = functions.partitioning(num_partitions)

    def body(i, x_GM):
        return i + 1, Annotator(parts).locally(tf.tanh, [(x_GM, "GM")], "GM")

    def fn(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch.x_GM)
            loop_vars = (0, batch.x_GM)
            _, y_GM = tf.while_loop(lambda i, _: i < 3, body, loop_vars, maximum_iterations=3)
            loss = tf.reduce_sum(y_GM**2)
        return NestedMap(y_GM=y_GM, d_x_GM=tape.gradient(loss, batch.x_GM))

    specs = NestedMap(x_GM=functions.f32((8, 3), "GM"))
    annotated = AnnotatedFn("loop", fn, ("batch",), (specs,), {"y_GM": "GM", "d_x_GM": "GM"})
    x = functions.randoms(specs, 3).x_GM
    got = compile_program(lowering.export(annotated, parts))(NestedMap(x_GM=x))

    values = [x]
    for _ in range(3):
        values.append(np.tanh(values[-1]))
    gradient = 2 * values[-1]
    for value in reversed(values[1:]):
        gradient *= 1 - value**2
    np.testing.assert_allclose(got.y_GM, values[-1], rtol=1e-5)
    np.testing.assert_allclose(got.d_x_GM, gradient, rtol=1e-5, atol=1e-6)


def test_a_part_that_a_loop_carries_is_refused():
    """The loop's gradient would keep the parts of all its steps."""
    parts = functions.partitioning(4)
    mesh = parts.mesh.grid

    def body(i, x):
        part = manual.auto_to_manual_spmd_partition(x, mesh, ("d", None))
        return i + 1, manual.manual_to_auto_spmd_partition(tf.tanh(part), mesh, ("d", None))

    def fn(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch.x)
            _, y = tf.while_loop(lambda i, _: i < 3, body, (0, batch.x), maximum_iterations=3)
            loss = tf.reduce_sum(y)
        return NestedMap(d_x=tape.gradient(loss, batch.x))

    specs = NestedMap(x=functions.f32((8, 3), "G_"))
    annotated = AnnotatedFn("carried", fn, ("batch",), (specs,), {"d_x": "G_"})
    message = r"carried: .* of shape \[3, 2, 3\] is one partition's part, but leaves its manual"
    with pytest.raises(ValueError, match=message):
        lowering.export(annotated, parts)


def test_tensors_outside_of_the_region_are_refused(graph_tensor):
    """Otherwise XLA would end the process, or the gradient would lack other partitions' terms."""
    part = manual.auto_to_manual_spmd_partition(graph_tensor, _MESH, ("x", None))
    part = part * tf.constant(2.0) + tf.cast(tf.range(6), tf.float32)
    whole = manual.manual_to_auto_spmd_partition(part, _MESH, ("x", None))
    outside = tf.compat.v1.placeholder(tf.float32, [6], name="outside")
    message = r"computes with outside:0 of shape \(6,\), which has not entered the manual region"
    with pytest.raises(ValueError, match=message):
        manual.manual_to_auto_spmd_partition(part + outside, _MESH, ("x", None))
    with pytest.raises(ValueError, match="which has not entered the manual region"):
        manual.manual_to_auto_spmd_partition(part + whole[:2], _MESH, ("x", None))
    for tensor, axes in ((whole, ("x", None)), (2.0 * outside, ("x",))):
        with pytest.raises(ValueError, match=": it has not entered the manual region"):
            manual.manual_to_auto_spmd_partition(tensor, _MESH, axes)


def test_a_value_is_refused():
    for function in (manual.auto_to_manual_spmd_partition, manual.manual_to_auto_spmd_partition):
        with pytest.raises(ValueError, match=function.__name__):
            function(tf.ones([4, 6]), _MESH, ("x", None))


def test_an_annotation_inside_is_refused(graph_tensor):
    part = manual.auto_to_manual_spmd_partition(graph_tensor, _MESH, ("x", None))
    with pytest.raises(ValueError, match="the annotation XlaSharding.* is not allowed in a region"):
        manual.manual_to_auto_spmd_partition(annotate.replicate(part), _MESH, ("x", None))


def test_a_letter_of_two_splits_is_refused(graph_tensor):
    """In GM, G has taken x, so M has parts of another size there."""
    annotator = Annotator(Partitioning.from_dict(_MESH, {"G": "x", "M": ("y", "x")}))
    message = "locally: dim M is split along y.x in '_M', but along y in 'GM': name the dims by"
    with pytest.raises(ValueError, match=message):
        annotator.locally(tf.tanh, [(graph_tensor, "_M")], "GM")


@pytest.mark.parametrize("num_partitions", [1, 8])
def test_local_code_of_uneven_parts_equals_numpy(num_partitions):
    """There are 13 groups of 3 rows, and each gathers 4 rows."""
    parts = functions.partitioning(num_partitions)

    def fn(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch.x)
            index = tf.cast(batch.index, tf.int32)
            rows = Annotator(parts).locally(
                lambda x, index: tf.gather(x, index, batch_dims=1),
                [(batch.x, "G_M"), (index, "G_")],
                "G_M",
            )
            loss = tf.reduce_sum(tf.square(rows))
        return NestedMap(rows=rows, d_x=tape.gradient(loss, batch.x))

    args = (NestedMap(x=functions.f32((13, 3, 5), "G_M"), index=functions.f32((13, 4), "G_")),)
    run = compile_program(
        lowering.export(AnnotatedFn("local", fn, ("batch",), args, {"rows": "G_M"}), parts)
    )
    batch = functions.randoms(args[0], 1)
    index = np.random.default_rng(2).integers(0, 3, (13, 4))
    batch.index = index.astype(np.float32)
    found = run(batch)

    rows = np.take_along_axis(batch.x, index[..., None], 1)
    d_x = np.zeros_like(batch.x)
    np.add.at(d_x, (np.arange(13)[:, None], index), 2 * rows)
    np.testing.assert_allclose(found.rows, rows)
    np.testing.assert_allclose(found.d_x, d_x, rtol=1e-6)
