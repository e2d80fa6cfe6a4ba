"""Shapes, bytes and trips of operations, compared with JAX's own for the same program."""

import jax
import jax.numpy as jnp
import pytest

from xla_plan.program import stablehlo_program
from xla_spmd import stablehlo


def _operations(function, *args):
    program = stablehlo_program.of_jitted(jax.jit(function), args, "cpu")
    return list(stablehlo.walk(program.module.body))


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "complex64"])
def test_shapes_and_bytes_equal_the_arrays(dtype):
    array = jax.ShapeDtypeStruct((3, 5), dtype)
    (transpose,) = [
        operation
        for operation in _operations(jnp.transpose, array)
        if operation.operation.name == "stablehlo.transpose"
    ]
    (result,) = transpose.results
    assert stablehlo.shape(result) == (5, 3)
    assert stablehlo.element_bytes(result) == jnp.dtype(dtype).itemsize


def test_the_trips_of_a_loop_are_counted_unless_data_decide():
    def trips(function):
        operations = _operations(function, jax.ShapeDtypeStruct((), jnp.float32))
        (loop,) = [each for each in operations if each.operation.name == "stablehlo.while"]
        return stablehlo.num_trips(loop.operation.regions[0].blocks[0])

    assert trips(lambda x: jax.lax.fori_loop(0, 7, lambda i, y: y * 2, x)) == 7
    assert trips(lambda x: jax.lax.while_loop(lambda y: y < x, lambda y: y + 1, x * 0)) == 1
