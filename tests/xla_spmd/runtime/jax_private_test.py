"""Indices and LAPACK by JAX's private functions; stablehlo_program_test.py tests its modules."""

import subprocess
import sys

import jax
import pytest

from xla_spmd.runtime import jax_private


def test_a_process_holds_as_many_indices_as_its_devices_do():
    mesh = jax.sharding.Mesh(jax.devices()[:4], "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert jax_private.num_addressable_indices(sharding, 0, (8, 3)) == 8


_CHOLESKY = """
import sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=1, platform="cpu")
import jax, jax.numpy as jnp, numpy as np
from jax import export
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from xla_spmd.mesh import Mesh
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.program import Program

spec = NestedMap(x=TensorSpec((3, 3), "float32", "__"))

def run(function, x):
    exported = export.export(jax.jit(lambda x: [function(x)]))(jax.ShapeDtypeStruct((3, 3), "f4"))
    parts = Partitioning.from_dict(Mesh.flat(1), {})
    program = Program("f", exported.serialize(), parts, ("a",), (spec,), spec, ())
    return np.asarray(compile_program(program)(NestedMap(x=x)).x)

x = np.array([[4, 2, 0], [2, 5, 0], [0, 0, 9]], np.float32)
np.testing.assert_array_equal(run(lambda x: x @ x, x), x @ x)
print("scipy.linalg" in sys.modules)
np.testing.assert_allclose(run(jnp.linalg.cholesky, x), np.linalg.cholesky(x), rtol=1e-6)
print("scipy.linalg" in sys.modules)
"""


@pytest.mark.slow
def test_lapack_is_loaded_only_for_a_program_that_calls_it():
    output = subprocess.check_output([sys.executable, "-c", _CHOLESKY], text=True)
    assert output.split() == ["False", "True"]
