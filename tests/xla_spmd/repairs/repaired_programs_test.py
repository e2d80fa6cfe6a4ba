"""Operators that XLA partitions wrongly and the library repairs: their values, and their compilers.

All are in one program over two axes. Each has its kind in examples/partitioner_faults/README.md.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.xla_spmd import compilers
from xla_spmd.mesh import Mesh

_MESH = Mesh(("x", "y"), (2, 4))
_BOTH = ("x", "y")


def _scattered_rows(x, ids, place):
    return tf.math.unsorted_segment_max(place(x, "y", None), ids, 6)


def _gathered_rows(x, ids, place):
    """The indices are split along x, and the result splits the chosen columns along it."""
    chosen = tf.gather(place(x, "y", "x"), place(ids[:3, None], "x", None) % 5)
    return place(chosen, None, "y", "x")


def _strided_element(x, ids, place):
    return place(x[2:3:3], _BOTH, None)


def _gradient_of_strides(x, ids, place):
    """A padding between elements of a whole tensor, whose result is split evenly."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = place(x[4:2:-1, 3:7:2], None, None)
        loss = tf.reduce_sum(y * y)
    return place(tape.gradient(loss, x), None, "x")


def _prefix_beside_the_whole(x, ids, place):
    placed = place(x, "y", None)
    return place(placed[:1], None, None) + place(placed, None, None)[1:4]


def _transform(x, ids, place):
    spectrum = tf.signal.fft(tf.complex(place(x, None, "x"), x))
    return place(tf.math.real(spectrum), "y", "x")


def _convolution(x, ids, place):
    """The gradient of a kernel whose image is split along y, with copies along x."""
    kernel = tf.cos(tf.reshape(tf.range(6, dtype=x.dtype), [3, 2, 1, 1]))
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        image = place(tf.reshape(x, [1, 8, 5, 1]), None, "y", None, None)
        loss = tf.reduce_sum(tf.sin(tf.nn.conv2d(image, kernel, 1, "SAME")))
    return tape.gradient(loss, kernel)


def _pooling(x, ids, place):
    with tf.GradientTape() as tape:
        tape.watch(x)
        image = place(tf.reshape(x, [1, 8, 5, 1]), None, "y", "x", None)
        loss = tf.reduce_sum(tf.sin(tf.nn.max_pool2d(image, 3, 1, "SAME")))
    return tape.gradient(loss, x)


_PROGRAMS = (
    _scattered_rows,
    _gathered_rows,
    _strided_element,
    _gradient_of_strides,
    _prefix_beside_the_whole,
    _transform,
    _convolution,
    _pooling,
)


def _results(batch, place):
    results = {}
    for program in _PROGRAMS:
        x = tf.exp(batch.x)
        results[program.__name__.strip("_")] = program(x, batch.ids, place)
    return results


def _batch():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 8)).astype("f")
    return NestedMap(x=x, ids=np.array([1, 2, 5, 2, 1], "i"))


def _exported():
    def fn(batch):
        def place(tensor, *axes):
            return annotate.mesh_split(tensor, _MESH, axes)

        return NestedMap(_results(batch, place))

    specs = _batch().Transform(lambda a: TensorSpec(a.shape, a.dtype.name, "_" * a.ndim))
    annotated = AnnotatedFn("repaired", fn, ("batch",), (specs,))
    return lowering.export(annotated, Partitioning.from_dict(_MESH, {}))


def test_repaired_programs_equal_tensorflows():
    got = compile_program(_exported())(_batch())
    want = _results(_batch().Transform(tf.constant), lambda tensor, *axes: tensor)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["v5e:2x4", "h100:1x8"])
def test_repaired_programs_compile_for_tpus_and_gpus(machine):
    compilers.need(machine)
    report = topology_executable.compile_program(_exported(), machine).report()
    assert report.count("all-reduce") > 0


@pytest.mark.parametrize("order", ["xy", "yx"])
@pytest.mark.parametrize(("before", "after"), [("P_", "QR"), ("P_", "RQ"), ("RQ", "_P")])
def test_a_dim_over_axes_of_sizes_that_do_not_divide_each_other(order, before, after):
    """On 2 x 3 devices, from a dim over both axes to one dim along each, or the other way."""
    table = {"P": tuple(order), "Q": "x", "R": "y"}
    parts = Partitioning.from_dict(Mesh(("x", "y"), (2, 3)), table)
    x = np.random.default_rng(1).standard_normal((5, 7)).astype("f")
    annotated = AnnotatedFn(
        "axes",
        lambda batch: NestedMap(y=tf.exp(batch.x)),
        ("batch",),
        (NestedMap(x=TensorSpec(x.shape, "float32", before)),),
        {"y": after},
    )
    got = compile_program(lowering.export(annotated, parts))(NestedMap(x=x)).y
    np.testing.assert_allclose(got, np.exp(x), rtol=1e-5)
