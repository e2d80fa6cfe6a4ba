"""A fault of XLA's SPMD partitioner: convolutions.

It prints one line, and then ends the process:

    whole (1, 1, 4, 3)
    Check failed: ShapeUtil::Compatible(shard_shape, sharded_conv->shape())

The image is dilated along its last dim, as in the gradient of a convolution with strides. Both dims
are split, and the windows along the other one are longer than a part and its neighbour. If either
of the two dims is whole, or the windows have three elements, the result is right.

Until XLA mends it: constrain the image and the result to be whole along the dim of long windows.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
padding = ((2, 1), (0, 0))


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))


def convolve(image, kernel, x, y):
    image = put(image, None, None, x, y)
    convolved = jax.lax.conv_general_dilated(image, kernel, (1, 1), padding, lhs_dilation=(1, 2))
    return put(convolved, None, None, x, y)


image, kernel = jnp.ones((1, 1, 4, 2)), jnp.ones((1, 1, 4, 1))
for name, x, y in ("whole", None, None), ("split", "x", "y"):
    print(name, jax.jit(convolve, static_argnums=(2, 3))(image, kernel, x, y).shape)
