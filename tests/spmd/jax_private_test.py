"""The names of JAX's inside that are used; processes_test.py has those of several processes."""

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
