"""The names of JAX's inside that are used; processes_test.py has those of several processes."""

import subprocess
import sys

import jax
from jax.sharding import AbstractMesh

from lingvo_gshard.spmd import jax_private

_TILED = jax.sharding.NamedSharding(
    AbstractMesh((2, 4), ("x", "y")), jax.sharding.PartitionSpec(None, "y")
)


def _serialized(sharding: jax.sharding.NamedSharding, num_dims: int) -> bytes:
    return sharding._to_xla_hlo_sharding(num_dims).to_proto().SerializeToString()


def test_a_tiled_sharding_is_read():
    kind, sharding = jax_private.hlo_sharding(_serialized(_TILED, 2))
    assert kind == "other"
    assert list(sharding.tile_assignment_dimensions()) == [1, 4, 2]
    (axes,) = jax_private.parse_flatten_op_sharding(sharding, _TILED.mesh)
    assert tuple(axes) == (None, "y")


def test_one_that_is_not_tiled_is_named():
    whole = jax.sharding.NamedSharding(_TILED.mesh, jax.sharding.PartitionSpec())
    kind, _ = jax_private.hlo_sharding(_serialized(whole, 2))
    assert kind == "replicated"


def test_a_process_holds_as_many_indices_as_its_devices_do():
    mesh = jax.sharding.Mesh(jax.devices()[:4], "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert jax_private.num_addressable_indices(sharding, 0, (8, 3)) == 8


def test_attached_devices_are_counted_without_an_error():
    assert jax_private.num_tpu_chips() >= 0
    assert jax_private.has_nvidia_gpu() in (False, True)


def test_jax_has_started_once_its_devices_are_asked_for():
    jax.devices()
    assert jax_private.has_started()


_CHOLESKY = """
import sys
from lingvo_gshard.spmd import environment
environment.prepare(num_devices=1, platform="cpu")
import jax, jax.numpy as jnp, numpy as np
from jax import export
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
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


def test_lapack_is_loaded_only_for_a_program_that_calls_it():
    output = subprocess.check_output([sys.executable, "-c", _CHOLESKY], text=True)
    assert output.split() == ["False", "True"]
