"""A fault of XLA's SPMD partitioner: gathers with rows in uneven parts.

It prints, where the second line should equal the first:

    whole 56.0
    Expected instruction to have shape equal to f32[7,1,2], actual shape is f32[7,1,8]

Each row gathers a column that its ids choose. The rows of the ids are split along y, unevenly. In
the result, the other dim of the ids is split along y, and the gathered column along x. With 8 rows,
or where either of these two dims is whole, it has been right.

Until XLA mends it: constrain the ids to be whole.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))


def fn(x, ids, before, after):
    rows = jnp.arange(7)[:, None]
    return put(put(jnp.exp(x)[rows, :, put(ids, before)], *after))


x, ids = jnp.zeros((7, 8, 2)), jnp.ones((7, 1), int)
for name, before, after in ("whole", None, ()), ("split", "y", (None, "y", "x")):
    print(name, jax.jit(fn, static_argnums=(2, 3))(x, ids, before, after).sum())
