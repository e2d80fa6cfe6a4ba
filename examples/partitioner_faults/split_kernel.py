"""A fault of XLA's SPMD partitioner: convolutions.

It prints, where the second line should equal the first:

    whole [4. 6. 6. 6. 6. 6. 6. 6. 4.]
    split [16. 24. 24. 24. 24. 24. 24. 24. 16.]

The image is split along axis x, the kernel's filters along y. The result is four times as large as
it should be.

Until XLA mends it: constrain the kernel to be replicated.
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


def fn(image, kernel, image_dim, kernel_dim):
    image, kernel = put(image, None, image_dim), put(kernel, None, None, None, kernel_dim)
    dims = ("NHWC", "HWIO", "NHWC")
    return put(jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims))


image, kernel = jnp.ones((2, 9, 4, 2)), jnp.ones((3, 1, 2, 4))
for name, dims in ("whole", (None, None)), ("split", ("x", "y")):
    print(name, jax.jit(fn, static_argnums=(2, 3))(image, kernel, *dims)[0, :, 0, 0])
