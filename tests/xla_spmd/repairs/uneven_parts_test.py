"""What moves the elements of uneven parts equals TensorFlow's own values, on one device."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from xla_spmd.mesh import Mesh

_MESHES = {
    "flat": Mesh.flat(8),
    "grid": Mesh(("x", "y"), (2, 4)),
    "cube": Mesh(("x", "y", "z"), (2, 2, 2)),
}
_M = 3


def _scatters(x_NM, ids_N, table_VM):
    """Returns a result of each operator that scatters rows; row 0 does not receive rows."""
    num_rows = table_VM.shape[0]
    index_N1 = ids_N[:, None]
    results = {}
    for name in ("sum", "mean", "max", "min", "prod"):
        segments = getattr(tf.math, f"unsorted_segment_{name}")
        results[f"segment_{name}"] = segments(x_NM, ids_N, num_rows)
    results["scatter_nd"] = tf.scatter_nd(index_N1, x_NM, table_VM.shape)
    for name in ("add", "sub", "max", "min", "update"):
        scatter = getattr(tf, f"tensor_scatter_nd_{name}")
        results[f"tensor_scatter_nd_{name}"] = scatter(table_VM, index_N1, x_NM)
    return results


# The fuzzer draws other sizes and splits.
@pytest.mark.parametrize(
    ("mesh", "num_rows", "ways"), [("flat", 13, 8), ("grid", 5, 2), ("cube", 1, 8), ("grid", 16, 8)]
)
def test_values_equal_tensorflows(mesh, num_rows, ways):
    """The rows are computed from split ones: exp of padding is 1."""
    parts = Partitioning.from_dict(_MESHES[mesh], {})
    rng = np.random.default_rng(num_rows)
    batch = NestedMap(
        x=rng.standard_normal((num_rows, _M)).astype("f"),
        ids=rng.permutation(num_rows).astype("i") + 1,
        table=rng.standard_normal((num_rows + 1, _M)).astype("f"),
    )

    def fn(batch):
        x_NM = tf.exp(annotate.split(batch.x, 0, ways))
        whole = _scatters(x_NM, batch.ids, batch.table)
        split = _scatters(x_NM, annotate.split(batch.ids, 0, ways), batch.table)
        return NestedMap(whole=NestedMap(whole), split=NestedMap(split))

    specs = batch.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, "_" * a.ndim))
    annotated = AnnotatedFn("scatters", fn, ("batch",), (specs,))
    got = compile_program(lowering.export(annotated, parts))(batch)

    want = _scatters(tf.exp(batch.x), tf.constant(batch.ids), tf.constant(batch.table))
    for ids in ("whole", "split"):
        for name, value in want.items():
            np.testing.assert_allclose(
                got[ids][name], value, rtol=1e-5, atol=1e-6, err_msg=f"{ids} {name}"
            )


@pytest.mark.parametrize(
    ("mesh", "table"),
    [
        ("flat", {"B": "d"}),
        ("grid", {"B": "x"}),
        ("grid", {"B": "y", "V": "x"}),
        ("cube", {"B": ("x", "z"), "L": "y", "M": "z"}),
    ],
)
@pytest.mark.parametrize("num_rows", [5, 8])
def test_the_gradient_of_an_embedding_equals_numpys(mesh, table, num_rows):
    parts = Partitioning.from_dict(_MESHES[mesh], table)
    rng = np.random.default_rng(num_rows)
    batch = NestedMap(
        ids=rng.integers(1, 11, (num_rows, 3)).astype("i"),
        table=rng.standard_normal((11, _M)).astype("f"),
    )

    def fn(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch.table)
            rows_BLM = Annotator(parts).annotate(tf.gather(batch.table, batch.ids), "BLM")
            loss = tf.reduce_sum(tf.nn.softplus(rows_BLM) ** 2)
        return NestedMap(d_table=tape.gradient(loss, batch.table))

    specs = NestedMap(
        ids=TensorSpec((num_rows, 3), "int32", "BL"), table=functions.f32((11, _M), "VM")
    )
    annotated = AnnotatedFn("embedding", fn, ("batch",), (specs,))
    got = compile_program(lowering.export(annotated, parts))(batch).d_table

    rows = batch.table[batch.ids]
    softplus = np.log1p(np.exp(rows))
    want = np.zeros_like(batch.table)
    np.add.at(want, batch.ids, 2 * softplus / (1 + np.exp(-rows)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("num_rows", "dims", "pads", "constraints"),
    [
        (16, "B", 0, 3),  # Constraints of both arguments and the result. 8 divides the rows.
        (13, "_", 0, 3),  # Not split.
        (13, "B", 2, 3),  # Ids and rows are padded to 16.
        (3, "B", 0, 5),  # 8 would be more than twice as many: ids and rows stay whole.
    ],
)
def test_only_scatters_of_uneven_parts_change(num_rows, dims, pads, constraints):
    def fn(batch):
        return NestedMap(y=tf.math.unsorted_segment_sum(batch.x, batch.ids, 4))

    specs = NestedMap(
        x=functions.f32((num_rows, _M), f"{dims}_"), ids=TensorSpec((num_rows,), "int32", dims)
    )
    parts = Partitioning.from_dict(Mesh.flat(8), {"B": "d"})
    text = functions.stablehlo(lowering.export(AnnotatedFn("sum", fn, ("batch",), (specs,)), parts))
    _, _, body = text.partition("@call_tf")  # Arguments are padded before and after the call.
    assert body.count("stablehlo.pad") == pads
    assert body.count("sdy.sharding_constraint") == constraints


_MOVES = {
    "slice": lambda x: x[1:4] * 2.0,
    "last rows": lambda x: x[-2:],
    "strided slice": lambda x: x[1::3],
    "pad": lambda x: tf.pad(x, [[3, 1], [0, 0]], constant_values=2.0),
    "mirror": lambda x: tf.pad(x, [[2, 2], [0, 0]], "SYMMETRIC"),
    "concat": lambda x: tf.concat([x[:2], x, tf.exp(x[3:])], 0),
    "reverse": lambda x: tf.reverse(x, [0]),
    "roll": lambda x: tf.roll(x, 2, 0),
    "gather": lambda x: tf.gather(x, [3, 0, 3]),
    "dynamic slice": lambda x: tf.slice(
        x, [tf.cast(tf.math.floormod(x[0, 0], 2.0), tf.int32), 0], [3, 2]
    ),
    "update": lambda x: tf.tensor_scatter_nd_update(x, [[1], [3]], x[:2] + 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "ways", "num_rows"),
    [
        ("flat", 8, 5),
        ("cube", 8, 19),
        ("flat", 8, 16),
        ("grid", 2, 8),
        ("grid", 8, 5),
    ],
)
def test_moved_rows_equal_tensorflows(mesh, ways, num_rows):
    """Values and gradients of each, all in one program."""
    x = np.random.default_rng(num_rows).standard_normal((num_rows, _M)).astype("f")

    def results(x, annotated):
        values = {}
        for name, move in _MOVES.items():
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = annotated(move(annotated(tf.exp(x))))
                loss = tf.reduce_sum(tf.sin(y) * tf.cast(tf.range(y.shape[0])[:, None], "float32"))
            values[name] = y
            values[f"d {name}"] = tape.gradient(loss, x)
        return values

    def fn(batch):
        values = results(batch.x, lambda y: annotate.split(y, 0, ways))
        return NestedMap({name.replace(" ", "_"): value for name, value in values.items()})

    parts = Partitioning.from_dict(_MESHES[mesh], {})
    specs = NestedMap(x=functions.f32(x.shape, "__"))
    program = lowering.export(AnnotatedFn("moves", fn, ("batch",), (specs,)), parts)
    got = compile_program(program)(NestedMap(x=x))
    for name, value in results(tf.constant(x), lambda y: y).items():
        np.testing.assert_allclose(
            got[name.replace(" ", "_")], value, rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    ("num_rows", "move", "is_kept_whole"),
    [
        (16, lambda x: x[-2:], False),
        (16, lambda x: tf.concat([x[:1], x[1:]], 0), False),
        (14, lambda x: tf.pad(x, [[2, 0], [0, 0]]), False),
        (16, lambda x: x[1::3], True),
        (17, lambda x: x[-2:], True),
        (15, lambda x: x[1:], False),  # Each part takes one row of the next part.
        (16, lambda x: tf.pad(x, [[5, 0], [0, 0]]), True),
    ],
)
def test_rows_are_kept_whole_only_where_xla_would_misplace_them(num_rows, move, is_kept_whole):
    def fn(batch):
        return NestedMap(y=annotate.split(move(batch.x), 0, 8))

    specs = NestedMap(x=functions.f32((num_rows, _M), "B_"))
    parts = Partitioning.from_dict(Mesh.flat(8), {"B": "d"})
    text = functions.stablehlo(
        lowering.export(AnnotatedFn("moved", fn, ("batch",), (specs,)), parts)
    )
    _, _, body = text.partition("@call_tf")
    num_whole = body.count("sharding_constraint") - body.count('[{"d"}, {}]')
    assert (num_whole > 1) == is_kept_whole  # The program's result is whole in any case.


@pytest.mark.parametrize("num_kept", [7, 1])
def test_a_part_cut_in_place_is_not_taken_for_the_whole(num_kept):
    """Both are moved to all devices, and their parts have the same shape."""
    mesh = {7: Mesh.flat(8), 1: Mesh.flat(2)}[num_kept]
    num_rows = mesh.num_partitions
    x = np.random.default_rng(num_kept).standard_normal((num_rows, _M)).astype("f")

    def fn(batch):
        y = annotate.split(tf.exp(batch.x), 0, num_rows)
        return NestedMap(whole=annotate.replicate(y), cut=annotate.replicate(y[:num_kept]))

    parts = Partitioning.from_dict(mesh, {})
    specs = NestedMap(x=functions.f32(x.shape, "__"))
    program = lowering.export(AnnotatedFn("cut", fn, ("batch",), (specs,)), parts)
    got = compile_program(program)(NestedMap(x=x))
    np.testing.assert_allclose(got.whole, np.exp(x), rtol=1e-5)
    np.testing.assert_allclose(got.cut, np.exp(x)[:num_kept], rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "devices"),
    [
        ((2, 2, 1), [[[1, 0]], [[2, 3]]]),
        ((1, 4), [[1, 7, 0, 2], [6, 3, 5, 4]]),
        ((7, 24), [[1, 7], [2, 5], [0, 4], [3, 6]]),
    ],
)
def test_elements_gathered_from_devices_in_another_order_equal_tensorflows(shape, devices):
    x = np.random.default_rng(2).standard_normal(shape).astype("f")
    ids = np.random.default_rng(3).integers(0, shape, (5, len(shape)), dtype="i")

    def fn(batch, is_split=True):
        elements = tf.exp(batch.x)
        if is_split:
            elements = annotate.shard(elements, np.array(devices))
        y = tf.gather_nd(elements, batch.ids)
        return NestedMap(y=annotate.split(y, 0, 8) if is_split else y)

    batch = NestedMap(x=x, ids=ids)
    specs = batch.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, "_" * a.ndim))
    parts = Partitioning.from_dict(Mesh.flat(8), {})
    program = lowering.export(AnnotatedFn("elements", fn, ("batch",), (specs,)), parts)
    got = compile_program(program)(batch)
    want = fn(batch.Transform(tf.constant), is_split=False)
    np.testing.assert_allclose(got.y, want.y, 1e-5)


@pytest.mark.parametrize(("shape", "target"), [((1, 25, 1), (5, 5)), ((1, 1, 21), (7, 3))])
@pytest.mark.parametrize("ways", [2, 8])
def test_a_reshape_that_divides_an_uneven_dim_equals_numpys(shape, target, ways):
    batch = NestedMap(x=np.arange(np.prod(shape), dtype="f").reshape(shape))
    dim = int(np.argmax(shape))

    def fn(batch):
        y = tf.reshape(annotate.split(batch.x, dim, ways), target)
        return NestedMap(y=annotate.split(y, 0, ways))

    specs = batch.Transform(lambda a: TensorSpec(a.shape, "float32", "_" * a.ndim))
    parts = Partitioning.from_dict(Mesh.flat(8), {})
    program = lowering.export(AnnotatedFn("reshape", fn, ("batch",), (specs,)), parts)
    np.testing.assert_array_equal(compile_program(program)(batch).y, batch.x.reshape(target))
