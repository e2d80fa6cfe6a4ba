"""A fault of XLA's SPMD partitioner: products.

It prints, where the second line should equal the first:

    whole 64.0
    split 32.0

Three dims of four elements are summed. Both operands split the first one along axis x, and one of
the other two along y, but not the same one. XLA adds up along y, and forgets x. The dims are even.
If both operands split the same two dims, or one of them splits a single dim, the sum is right.

Until XLA mends it: constrain both operands to split the same dims.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))


def product(a, b, x, y):
    return jnp.einsum("ijk,ijk->", put(a, x, y, None), put(b, x, None, y))


ones = jnp.ones((4, 4, 4))
for name, x, y in ("whole", None, None), ("split", "x", "y"):
    print(name, jax.jit(product, static_argnums=(2, 3))(ones, ones, x, y))
