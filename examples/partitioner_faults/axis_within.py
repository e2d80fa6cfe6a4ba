"""A fault of XLA's SPMD partitioner: products.

It prints, where the second line should equal the first:

    whole [ 28.  92. 156. 220.]
    split [ 28. 156.  92. 220.]

The left operand splits its rows along axis y, the result along x and y, and the right operand has
its columns along y. XLA computes parts that are in order of y and x, and takes them for parts in
order of x and y. The dims are even. If the right operand's columns are whole, the result is right.

Until XLA mends it: constrain the result to split its rows along y, and only then along x and y.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))


def product(a, b, y, xy, z):
    return put(put(a, y, z) @ put(b, z, y), xy, z)[:, 0]


a = jnp.arange(32.0).reshape(4, 8)
for name, y, xy, z in ("whole", None, None, None), ("split", "y", ("x", "y"), "z"):
    print(name, jax.jit(product, static_argnums=(2, 3, 4))(a, jnp.ones((8, 2)), y, xy, z))
