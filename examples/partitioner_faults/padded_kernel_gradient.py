"""A fault of XLA's SPMD partitioner: convolutions.

It prints, where the second line should equal the first:

    whole [[[64. 56.]]]
    split [[[65. 64.]]]

There are 9 windows of 2 elements with a stride of 2: one more than the 8 that the image would have
without padding. No mesh of two axes is needed. With stride 1, more windows than the image has
elements are wrong as well. Programs with as many windows as the image has strides or fewer, so that
the padding is SAME or VALID, have been right.

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


def loss(kernel, image, dim):
    image = put(image, None, None, dim)
    return jax.lax.conv_general_dilated(image, kernel, (2,), [(1, 1)]).sum()


image = jnp.arange(16.0).reshape(1, 1, 16)
for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(jax.grad(loss), static_argnums=2)(jnp.ones((1, 1, 2)), image, dim))
