"""A fault of XLA's SPMD partitioner: scatters of rows in uneven parts.

It prints, where the second line should equal the first:

    whole [0. 3. 2.]
    split [3. 3. 2.]

The gradient of a gather, such as an embedding, is a scatter. exp makes the gradient of the padding
1, and row 0 gets three of them.

Until XLA mends it: pad the rows to a multiple of their parts, with ids out of bounds.
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


def loss(table, dim):
    rows = put(table[jnp.array([1, 2, 1, 2, 1])], dim)
    return jnp.exp(rows).sum()


for name, dim in ("whole", None), ("split", "y"):
    print(name, jax.jit(jax.grad(loss), static_argnums=1)(jnp.zeros(3), dim))
