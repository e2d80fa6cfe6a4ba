"""A fault of XLA's SPMD partitioner: convolutions.

It prints, where the second line should equal the first:

    whole [2. 2. 2. 2. 2. 2. 2. 2.]
    split [8. 8. 8. 8. 8. 8. 8. 8.]

Every channel has a separate kernel. The image is split along its space, the result along its
channels by another axis. Values are summed over the four parts of that axis. Filters of more than
one channel have been right.

Until XLA mends it: constrain the result to be split as the image is, and then as you want it.
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


def fn(image, kernel, before, after):
    image = put(image, None, None, before)
    result = jax.lax.conv_general_dilated(image, kernel, (1,), "VALID", feature_group_count=8)
    return put(put(result, None, after))


image, kernel = jnp.ones((1, 8, 8)), jnp.ones((8, 1, 2))
for name, dims in ("whole", (None, None)), ("split", ("x", "y")):
    print(name, jax.jit(fn, static_argnums=(2, 3))(image, kernel, *dims)[0, :, 0])
