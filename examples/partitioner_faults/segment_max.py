"""A fault of XLA's SPMD partitioner: scatters of rows in uneven parts.

It prints, where the second line should equal the first:

    whole [-inf  -1.  -2.]
    split [ 0. -1. -2.]

Five rows are in four parts of two, so that the last three places are padding. The padding
contributes to row 0, although no id names it. The fault needs an axis along which the rows have
copies. All reductions show it: a sum of rows unless the padding happens to be 0, and jnp.bincount,
too.

Until XLA mends it: pad the rows to a multiple of their parts, with ids that are out of bounds.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))


def fn(x, dim):
    ids = jnp.array([1, 2, 1, 2, 1])
    return put(jax.ops.segment_max(put(x, dim), ids, 3))


for name, dim in ("whole", None), ("split", "y"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(-5.0, 0.0), dim))
