"""A fault of XLA's SPMD partitioner: a dim over axes that are not in the mesh's order.

It prints, where the second line should equal the first:

    whole 36.0
    Check failed: sliced.has_value() Could not slice dimension 0 with size 2

The first dim is split over y and then x, of sizes 3 and 2, and goes to one dim along x and one
along y. With ("x", "y") instead of ("y", "x") it is right, and so it is on meshes of sizes 2 and 4.
XLA_FLAGS=--xla_enable_hlo_sharding_v3=false does not help: another check fails and aborts.

Until XLA mends it: constrain the tensor to be whole in between, or split it in the mesh's order.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 3), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))


def fn(x, before, after):
    return put(put(jnp.exp(put(x, *before)), *after))


x = jnp.zeros((6, 6))
for name, before, after in ("whole", (), ()), ("split", (("y", "x"),), ("x", "y")):
    print(name, jax.jit(fn, static_argnums=(1, 2))(x, before, after).sum(), flush=True)
