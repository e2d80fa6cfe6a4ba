"""Products whose tensors do not fit together equal TensorFlow's and NumPy's, on one device."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate, windows
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from xla_spmd.mesh import Mesh

_ORDER = [2, 4, 6, 0, 5, 1, 7, 3]


def _kernel_gradient(batch, split):
    """The gradient is a sum over windows, of which there are fewer than devices."""
    with tf.GradientTape() as tape:
        tape.watch(batch.kernel)
        y = split(windows.convolution(batch.x, batch.kernel, [3], "VALID", [1]), [1, 4, 2])
        loss = tf.reduce_sum(y * batch.d_y)
    return NestedMap(d_kernel=tape.gradient(loss, batch.kernel))


def _row_norms(batch, split):
    """The gradient of a product of a normalized tensor."""
    with tf.GradientTape() as tape:
        tape.watch(batch.kernel)
        x = split(tf.exp(batch.x), [1, 4, 2])
        x = split(tf.gather(x, [1, 0, 3], axis=1), [1, 2, 4])
        y = tf.einsum("blm,mn->bln", x * tf.math.rsqrt(tf.reduce_mean(x * x, 0) + 0.1), batch.w)
        loss = tf.reduce_sum(tf.sin(y)) + tf.reduce_sum(batch.kernel)
    return NestedMap(y=y, d=tape.gradient(loss, batch.kernel))


@pytest.mark.parametrize("results", [_kernel_gradient, _row_norms])
def test_sums_are_of_the_right_devices(results):
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 5, 1), "kernel": (2, 1, 2), "d_y": (1, 2, 2), "w": (1, 3)}
    batch = NestedMap({name: rng.standard_normal(s).astype("f") for name, s in shapes.items()})

    def annotated(batch):
        return results(batch, lambda x, ways: annotate.shard(x, np.reshape(_ORDER, ways)))

    specs = batch.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, "_" * a.ndim))
    parts = Partitioning.from_dict(Mesh.flat(8), {})
    program = lowering.export(AnnotatedFn("products", annotated, ("batch",), (specs,)), parts)
    got = compile_program(program)(batch)
    for name, value in results(batch.Transform(tf.constant), lambda x, ways: x).FlattenItems():
        np.testing.assert_allclose(got[name], value, 1e-4, 1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("equation", "lhs", "rhs", "result"),
    [
        # Three sums: along x in both, and along y in different dims.
        ("abc,abcn->n", ("x", "y", None), ("x", None, "y", None), (None,)),
        ("abc,cabn->n", (None, "y", "x"), ("x", "y", None, None), (None,)),
        # Three axes, of which two move.
        ("ma,an->mn", ("y", "z"), ("z", "y"), (("x", "y"), "z")),
    ],
)
@pytest.mark.parametrize("size", [4, 5])
def test_products_of_other_splits_equal_numpys(equation, lhs, rhs, result, size):
    mesh = Mesh(("x", "y", "z"), (2, 2, 2))
    rng = np.random.default_rng(size)
    batch = NestedMap(
        a=rng.standard_normal((size,) * len(lhs)).astype("f"),
        b=rng.standard_normal((size,) * len(rhs)).astype("f"),
    )

    def annotated(batch):
        a = annotate.mesh_split(batch.a, mesh, lhs)
        b = annotate.mesh_split(batch.b, mesh, rhs)
        return NestedMap(y=annotate.mesh_split(tf.einsum(equation, a, b), mesh, result))

    specs = batch.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, "_" * a.ndim))
    parts = Partitioning.from_dict(mesh, {})
    program = lowering.export(AnnotatedFn("products", annotated, ("batch",), (specs,)), parts)
    want = np.einsum(equation, batch.a, batch.b)
    np.testing.assert_allclose(compile_program(program)(batch).y, want, 1e-4, 1e-5)
