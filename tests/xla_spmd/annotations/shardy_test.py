"""Shardy's annotations: every form of TensorFlow's becomes one, and keeps its meaning."""

import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla_sharding
from lingvo_gshard.sharding import annotate, manual
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from xla_spmd.mesh import Mesh

_FLAT = Partitioning.from_dict(Mesh.flat(8), {"G": "d"})
_GRID = Partitioning.from_dict(Mesh(("x", "y"), (2, 4)), {"G": ("x", "y"), "B": "y"})
_SHAPE = (8, 12)


def _exported(fn, parts):
    """The program of fn(x) -> y, both [8, 12]."""
    specs = (NestedMap(x=functions.f32(_SHAPE, "__")),)
    annotated = AnnotatedFn("f", lambda batch: NestedMap(y=fn(batch.x)), ("batch",), specs)
    return lowering.export(annotated, parts)


def _run(exported_program):
    x = np.random.default_rng(1).standard_normal(_SHAPE).astype("f")
    return x, np.asarray(compile_program(exported_program)(NestedMap(x=x)).y)


@pytest.mark.parametrize(
    ("parts", "annotated", "sharding"),
    [
        (_FLAT, annotate.replicate, "<@mesh, [{}, {}]>"),
        (_GRID, lambda x: Annotator(_GRID).annotate(x, "G_"), '<@mesh, [{"x", "y"}, {}]>'),
        # A part of an axis: devices i and i + 4 hold slice i.
        (_FLAT, lambda x: annotate.split(x, 0, 4), '<@mesh, [{"d":(2)4}, {}]>'),
        (_GRID, lambda x: annotate.split(x, 0, 2), '<@mesh, [{"y":(2)2}, {}]>'),
        (
            _FLAT,
            lambda x: annotate.shard(x, np.arange(8).reshape(2, 4).T),
            '<@mesh, [{"d":(2)4}, {"d":(1)2}]>',
        ),
        # Orders that the axes cannot express.
        (
            _FLAT,
            lambda x: annotate.shard(x, np.array([3, 1, 0, 2, 7, 5, 6, 4])[:, None]),
            '<@device_order_0, [{"dim0"}, {}]>',
        ),
    ],
)
def test_each_form_of_annotation(parts, annotated, sharding):
    exported = _exported(lambda x: tf.exp(annotated(x)) - 1.0, parts)
    text = functions.stablehlo(exported)
    assert f"sdy.sharding_constraint %0 {sharding}" in re.sub(r"%\d+ <", "%0 <", text)
    assert "mhlo.sharding" not in text
    assert "custom_call" not in text
    x, y = _run(exported)
    np.testing.assert_allclose(y, np.expm1(x), rtol=1e-5, atol=1e-6)


def test_equal_device_orders_share_a_mesh():
    order = np.array([3, 1, 0, 2, 7, 5, 6, 4])

    def fn(x):
        y = annotate.shard(tf.sin(x), order[:, None])
        z = annotate.shard(tf.cos(y), order.reshape(2, 4))
        return annotate.shard(tf.tanh(z), order[:, None])

    exported = _exported(fn, _GRID)
    assert len(re.findall("sdy.mesh @device_order_", functions.stablehlo(exported))) == 2
    x, y = _run(exported)
    np.testing.assert_allclose(y, np.tanh(np.cos(np.sin(x))), rtol=1e-5)


def test_a_warning_names_axes_that_do_not_divide_each_other(caplog):
    mesh = Mesh(("data", "experts"), (3, 2))
    parts = Partitioning.from_dict(mesh, {"G": ["data", "experts"]})
    annotator = Annotator(parts)
    exported = _exported(
        lambda x: annotator.annotate(annotator.annotate(2.0 * x, "G_"), "G_"), parts
    )
    (record,) = caplog.records
    assert "'data': 3, 'experts': 2} has a dim over data and experts, whose" in record.getMessage()
    x, y = _run(exported)
    np.testing.assert_array_equal(y, 2 * x)


def test_a_permuted_device_assignment_stays_out_of_annotations():
    mesh = Mesh(("d",), (2,), device_assignment=(1, 0))
    parts = Partitioning.from_dict(mesh, {"G": "d"})
    exported = _exported(lambda x: Annotator(parts).annotate(2.0 * x, "G_"), parts)
    assert "device_order" not in functions.stablehlo(exported)
    x, y = _run(exported)
    np.testing.assert_array_equal(y, 2 * x)


def _squares(x):
    """Each row times itself, in a manual region."""
    return Annotator(_GRID).locally(lambda part: part * part, [(x, "G_")], "G_")


def _in_a_loop(x):
    _, y = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, _squares(y)), (0, x))
    return y


def _in_a_branch(x):
    return tf.cond(tf.reduce_sum(x) < 1e6, lambda: _squares(_squares(x)), lambda: x)


def _in_a_function(x):
    inner = tf.function(lambda y: _squares(annotate.split(y, 0, 8)), autograph=False)
    return inner(inner(x))


@pytest.mark.parametrize("fn", [_in_a_loop, _in_a_branch, _in_a_function])
def test_regions_inside_others(fn):
    exported = _exported(fn, _GRID)
    text = functions.stablehlo(exported)
    assert "sdy.manual_computation" in text
    assert "custom_call" not in text
    x, y = _run(exported)
    np.testing.assert_allclose(y, x**4, rtol=1e-5)


def test_one_region_has_several_results():
    """They are computed once: here by one loop."""

    def two(part):
        _, total = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + part), (0, part))
        return [total, 2.0 * total]

    def fn(x):
        first, second = Annotator(_GRID).locally_all(two, [(x, "G_")], ["G_", "G_"])
        return first + second

    exported = _exported(fn, _GRID)
    text = functions.stablehlo(exported)
    assert text.count("sdy.manual_computation") == 1
    assert text.count("stablehlo.while") == 1
    x, y = _run(exported)
    np.testing.assert_allclose(y, 12 * x, rtol=1e-5)


def test_a_region_may_use_operations_after_its_first_result():
    """TensorFlow lowers the first exit and its users before the second entry's tensor."""
    mesh = _FLAT.mesh

    def enter(x):
        return manual.auto_to_manual_spmd_partition(x, mesh, ("d", None))

    def leave(part):
        return manual.manual_to_auto_spmd_partition(part, mesh, ("d", None))

    def fn(x):
        part = tf.exp(enter(x))
        first = leave(part)
        after = tf.reduce_sum(tf.sin(first))
        second = leave(part * enter(tf.cos(x)))
        return second + after

    exported = _exported(fn, _FLAT)
    assert functions.stablehlo(exported).count("sdy.manual_computation") == 1
    x, y = _run(exported)
    np.testing.assert_allclose(y, np.exp(x) * np.cos(x) + np.sin(np.exp(x)).sum(), rtol=1e-4)


def test_a_region_after_another_that_it_shares_a_part_with():
    """An entry that needs the result of an exit is in a separate region."""
    mesh = _FLAT.mesh

    def fn(x):
        part = tf.exp(manual.auto_to_manual_spmd_partition(x, mesh, ("d", None)))
        first = manual.manual_to_auto_spmd_partition(part, mesh, ("d", None))
        rolled = manual.auto_to_manual_spmd_partition(tf.roll(first, 1, 0), mesh, ("d", None))
        return manual.manual_to_auto_spmd_partition(part + rolled, mesh, ("d", None))

    exported = _exported(fn, _FLAT)
    assert functions.stablehlo(exported).count("sdy.manual_computation") == 2
    x, y = _run(exported)
    np.testing.assert_allclose(y, np.exp(x) + np.exp(np.roll(x, 1, 0)), rtol=1e-5)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (
            xla_sharding.Sharding.assign_device(3),
            r"f: .* of shape \[8, 12\]: the annotation \{maximal device=3\} is neither replicated "
            r"nor tiled over all devices of the mesh \{'d': 8\}",
        ),
        (
            xla_sharding.Sharding.tile(np.arange(4)[:, None]),
            r"f: .* of shape \[8, 12\]: the annotation .* is for 4 devices, but the mesh "
            r"\{'d': 8\} has 8",
        ),
    ],
)
def test_annotations_that_the_mesh_cannot_express_are_refused(sharding, message):
    """TensorFlow's own API takes these."""
    with pytest.raises(ValueError, match=message):
        _exported(lambda x: sharding.apply_to_tensor(x, use_sharding_op=True), _FLAT)


def test_one_device_has_no_annotations():
    one = Partitioning.from_dict(Mesh.flat(1), {})
    exported = _exported(lambda x: annotate.replicate(x) + 1.0, one)
    assert "sharding_constraint" not in functions.stablehlo(exported)
    x, y = _run(exported)
    np.testing.assert_array_equal(y, x + 1)


def test_a_size_that_depends_on_values_is_refused():
    def filtered(x):
        rows = tf.gather(tf.concat([x, x], 0), [3, 11])
        return x + tf.reduce_sum(tf.boolean_mask(rows, rows[:, 0] > 0))

    with pytest.raises(ValueError, match=r"boolean_mask.* has a size that depends on values"):
        _exported(filtered, _FLAT)
    x, y = _run(_exported(filtered, Partitioning.from_dict(Mesh.flat(1), {})))
    rows = x[[3, 3]]
    np.testing.assert_allclose(y, x + rows[rows[:, 0] > 0].sum(), 1e-5)
