"""Refused dtypes are named; each process gets its share of a batch's rows."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering, program, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.specs import WHOLE, Share
from tests.spmd import functions
from xla_spmd.mesh import Mesh


def _export(dtype: str, fn) -> program.Program:
    args = (NestedMap(x_B=TensorSpec((8,), dtype, "B")),)
    return lowering.export(AnnotatedFn("f", fn, ("state",), args), functions.partitioning(2))


def _keep(state: NestedMap) -> NestedMap:
    return NestedMap(y=state.x_B)


@pytest.mark.parametrize("dtype", ["int64", "complex128"])
def test_64_bits_are_refused_and_not_narrowed(dtype):
    message = rf"f: argument state.x_B \[8\] is of dtype {dtype}, but JAX_ENABLE_X64 is off"
    with pytest.raises(ValueError, match=message):
        _export(dtype, _keep)
    result = rf"f: result y \[8\] is of dtype {dtype}, .* JAX_ENABLE_X64 is off"
    with pytest.raises(ValueError, match=result):
        _export("float32", lambda state: NestedMap(y=tf.cast(state.x_B, dtype)))


def test_a_dtype_that_programs_lack_lists_those_they_have():
    message = "is of dtype float8_e4m3fn; expected one of bool, int8, .*64"
    with pytest.raises(ValueError, match=message):
        _export("float8_e4m3fn", _keep)


@pytest.mark.slow
def test_unsupported_dtypes_of_a_platform_are_refused():
    code = """
import jax
jax.config.update("jax_enable_x64", True)
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from xla_spmd.mesh import Mesh
from lingvo_gshard.spmd import specs
leaves = [("state.x", TensorSpec((2, 3), "complex128", "__"))]
specs.check_dtypes("f: argument", leaves, "cpu")
specs.check_dtypes("f: argument", leaves, "tpu")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1] == (
        "ValueError: f: argument state.x [2, 3] is of dtype complex128, which a tpu lacks."
    )


def test_every_dtype_of_32_bits_or_less_passes_through():
    names = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"]
    names += ["float16", "bfloat16", "float32", "complex64"]
    tree = NestedMap({name: TensorSpec((8,), name, "B") for name in names})
    specs.check_dtypes("f: argument", tree.FlattenItems(), "tpu")
    annotated = AnnotatedFn("f", lambda s: s, ("state",), (tree,), {n: "B" for n in names})
    executable = compile_program(lowering.export(annotated, functions.partitioning(2)))
    ones = tree.Transform(lambda spec: tf.ones(spec.shape, spec.dtype).numpy())
    for name, leaf in executable(ones).FlattenItems():
        assert leaf.dtype == name and (leaf == 1).all()


@pytest.mark.parametrize(
    ("held", "want"),
    [
        # Rows are split over the processes' devices in order, or in another order.
        ({0: {0, 1}, 1: {2, 3}}, [Share(0, 2), Share(1, 2)]),
        ({0: {2, 3}, 1: {0, 1}}, [Share(1, 2), Share(0, 2)]),
        # Two processes hold the same rows, or all hold all rows.
        ({0: {0, 1}, 1: {0, 1}, 2: {2, 3}}, [Share(0, 2), Share(0, 2), Share(1, 2)]),
        ({0: {0, 1, 2}, 1: {0, 1, 2}}, [WHOLE, WHOLE]),
        # Rows are not adjacent, not on a part's border, or not equally many.
        ({0: {0, 2}, 1: {1, 3}}, [WHOLE, WHOLE]),
        ({0: {0, 3}, 1: {1, 2}}, [WHOLE, WHOLE]),
        ({0: {0}, 1: {1, 2, 3}}, [WHOLE, WHOLE]),
    ],
)
def test_the_share_of_each_process(held, want):
    assert [specs.share_of(held, process) for process in held] == want


def test_one_process_reads_all_rows():
    parts = Partitioning.from_dict(Mesh.flat(4), {"B": "d"})
    assert specs.own_share(parts, 8) == specs.own_share(parts, 13) == WHOLE


def test_dim_B_holds_the_rows_of_a_batch():
    batch = NestedMap(
        lengths=TensorSpec((3,), "int32", "_"), rows=TensorSpec((2, 13), "int32", "LB")
    )
    assert specs.num_rows(batch) == 13
    assert specs.num_rows(NestedMap(lengths=batch.lengths)) == 1


@pytest.mark.parametrize("axes", [("y", "x"), "x"])
def test_own_rows_are_fetched_once_and_in_order(axes):
    parts = Partitioning.from_dict(Mesh(("x", "y"), (2, 2)), {"B": axes})
    spec, rows = TensorSpec((8, 3), "int32", "B_"), np.arange(24, dtype=np.int32).reshape(8, 3)
    placed = jax.device_put(rows, specs.sharding(parts, spec, specs.device_mesh(parts)))
    found = Share(0, 2).of(NestedMap(x=placed)).x
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, rows)  # This process holds all devices.


def test_a_spec_in_json_names_a_stack_if_it_has_one():
    tree = NestedMap(
        a=TensorSpec((2, 3), "float32", "MH"), b=TensorSpec((2, 3), "float32", "MH", "encoder")
    )
    encoded = specs.to_json(tree)
    assert (encoded.a, encoded.b) == ("float32|2,3|MH", "float32|2,3|MH|encoder")
    assert specs.from_json(encoded) == tree
