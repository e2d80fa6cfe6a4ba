"""A fault of XLA's SPMD partitioner: convolutions.

It prints, where the second line should equal the first:

    whole [[[0. 1. 0. 0. 1. 0. 0. 1. 0.]]]
    Check failed: get_first_valid_element_offset_on_dilated_shard(0) == swd->padding_low()

A window of one element has a stride of 3 and padding of 2 on both sides.

Until XLA mends it: pad by jnp.pad, and convolve without padding.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))


def loss(image, kernel, dim):
    image = put(image, None, None, dim)
    return jax.lax.conv_general_dilated(image, kernel, (3,), [(2, 2)]).sum()


image, kernel = jnp.zeros((1, 1, 9)), jnp.ones((1, 1, 1))
for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(jax.grad(loss), static_argnums=2)(image, kernel, dim), flush=True)
