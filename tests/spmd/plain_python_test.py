"""A function of plain dicts, with the arrays of other libraries; mistakes in one line."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap, nested
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import annotations, lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions

_Pair = collections.namedtuple("_Pair", ["w", "b"])


def _affine(weights, batch):
    """y = x w + b, by attributes and by keys."""
    return {"y": batch["x"] @ weights.w + weights["b"]}


def _annotated(**changes):
    weights = {"w": TensorSpec([3, 2], np.float32, "MH"), "b": TensorSpec(2, tf.float32, "H")}
    fields = {
        "name": "affine",
        "fn": _affine,
        "arg_names": ["weights", "batch"],
        "args": [weights, {"x": TensorSpec(tf.TensorShape([4, 3]), jnp.float32, "BM")}],
        "result_dims": {"y": "BH"},
    }
    return AnnotatedFn(**(fields | changes))


@pytest.fixture(scope="module")
def affine():
    return compile_program(lowering.export(_annotated(), functions.partitioning(2)))


_X = np.arange(12, dtype=np.float32).reshape(4, 3)
_W = np.float32([[1, 2], [3, 4], [5, 6]])


@pytest.mark.parametrize(
    "weights",
    [
        {"w": _W, "b": np.float32([1, 2])},
        {"w": tf.Variable(_W), "b": tf.constant([1.0, 2.0])},
        {"w": jnp.asarray(_W), "b": tf.constant([1.0, 2.0]).numpy()},
    ],
)
def test_arrays_of_all_kinds_in_plain_dicts_are_taken(affine, weights):
    expected = _X @ _W + [1, 2]
    np.testing.assert_allclose(affine(weights, {"x": _X}).y, expected)
    placed = affine.place("weights", weights)
    np.testing.assert_allclose(affine(placed, {"x": tf.constant(_X)}).y, expected)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": _X.astype("float64")}, r"float64\[4, 3\] given, .* Cast it: x.astype\('float32'\)"),
        ({"x": _X[:2]}, r"float32\[2, 3\] given, float32\[4, 3\] expected\.$"),
        ({"x": "text"}, "a str given"),
        ({}, r"missing \['x'\]"),
        ({"x": [1.0, 2.0]}, r"A list is a tree, not an array: write numpy.array\(x, dtype\)"),
        (_X, "argument batch: expected a dict by name, such as {'x': x}, got ndarray"),
        ({1: _X}, "argument batch: expected names as keys, got 1"),
    ],
)
def test_other_arguments_are_refused_by_their_names(affine, batch, message):
    with pytest.raises(ValueError, match=message):
        affine({"w": _W, "b": np.float32([1, 2])}, batch)


def test_a_number_gets_the_dtype_but_loses_no_fraction():
    spec = {"n": TensorSpec((), "int32", "")}
    twice = AnnotatedFn("twice", lambda a: {"y": 2 * a.n}, ("a",), (spec,))
    run = compile_program(lowering.export(twice, functions.partitioning(1)))
    assert int(run({"n": 3}).y) == 6
    with pytest.raises(ValueError, match=r"float64\[\] given, int32\[\] expected"):
        run({"n": 3.5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fn": lambda weights, batch: None},
            "affine: what fn returns: expected a dict .* NoneType",
        ),
        ({"fn": lambda weights, batch: batch.x}, "what fn returns: expected a dict by name"),
        ({"arg_names": "batch"}, r"arg_names and args: expected tuples of names and of dicts"),
        ({"args": {"x": TensorSpec((2,), "int32", "_")}}, "arg_names and args: expected tuples"),
        ({"args": [TensorSpec((2,), "int32", "_"), {}]}, "argument weights: expected a dict by n"),
        (
            {"args": [{"w": tf.Variable(_W)}, {}]},
            r"argument weights.w: expected a TensorSpec, got ResourceVariable: "
            r"TensorSpec\(x.shape, x.dtype, dims\), with 2 letters as dims",
        ),
        (
            {"fn": lambda batch: batch},
            r"fn: expected a function of \(.*\): too many positional arg",
        ),
        ({"fn": None}, r"fn: expected a function of \(.*\), got NoneType"),
        ({"args": [{"w": 3}, {}]}, r"argument weights.w: expected a TensorSpec, got int\.$"),
    ],
)
def test_a_function_of_another_form_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        lowering.export(_annotated(**changes), functions.partitioning(2))


def test_only_annotated_functions_with_a_partitioning_are_exported():
    with pytest.raises(ValueError, match="expected an AnnotatedFn, .*, got function"):
        annotations.describe(_affine, functions.partitioning(2))
    with pytest.raises(ValueError, match=r"affine: expected a Partitioning, such as .*, got dict"):
        annotations.describe(_annotated(), {"B": "d"})
    with pytest.raises(ValueError, match="export: expected an AnnotatedFn, .*, got function"):
        lowering.export(_affine, functions.partitioning(2))
    with pytest.raises(ValueError, match="compile_program: expected the Program .*, got Annotated"):
        compile_program(_annotated())


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((None, 3), "float32", r"shape \(None, 3\): expected the size of each dim"),
        (tf.TensorShape(None), "float32", "expected the size of each dim"),
        ((2, 3), len, r"dtype <built-in function len>: expected a name such as 'float32'"),
        ((2.5, 3), "float32", "expected the size of each dim"),
    ],
)
def test_a_spec_needs_sizes_and_a_dtype(shape, dtype, message):
    with pytest.raises(ValueError, match=f"TensorSpec: .*{message}"):
        TensorSpec(shape, dtype, "BM")


@pytest.mark.parametrize("dtype", [tf.bfloat16, jnp.bfloat16, "bfloat16", np.dtype("bfloat16")])
def test_a_spec_has_the_name_of_a_dtype(dtype):
    spec = TensorSpec(np.shape(_X), dtype, "BM")
    assert spec == TensorSpec((4, 3), "bfloat16", "BM") and hash(spec)


def test_dicts_and_named_tuples_become_maps():
    tree = nested("a tree", {"a": {"b": 1}, "c": [_Pair(2, {"d": 3})], "e": (4, 5)})
    assert [path for path, _ in tree.FlattenItems()] == [
        "a.b",
        "c[0].b.d",
        "c[0].w",
        "e[0]",
        "e[1]",
    ]
    assert isinstance(tree.a, NestedMap) and tree.c[0].b.d == 3
