"""A fault of XLA's SPMD partitioner: a dim over axes that are not in the mesh's order.

The second line should equal the first; docs/partitioner_faults.md shows it.
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
