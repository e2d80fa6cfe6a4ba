"""A fault of XLA's SPMD partitioner: fewer windows than parts.

It prints, where the second line should equal the first:

    whole [[[1. 1. 1. 1.]]]
    Slice dim size 1 greater than dynamic slice dimension: 0.

The image has four parts along y, but there is a single window. Although the result is whole, the
partitioner splits its gradient as the image is split.

Until XLA mends it: constrain the image to be whole.
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


def loss(image, kernel, dim):
    image = put(image, None, None, dim)
    return put(jax.lax.conv(image, kernel, (2,), "VALID")).sum()


image, kernel = jnp.zeros((1, 1, 4)), jnp.ones((1, 1, 4))
for name, dim in ("whole", None), ("split", "y"):
    print(name, jax.jit(jax.grad(loss), static_argnums=2)(image, kernel, dim), flush=True)
