"""A fault of XLA's SPMD partitioner: convolutions.

It prints, where the second line should equal the first:

    whole [[[15. 16. 15.]]]
    split [[[30. 32. 30.]]]

The image is split along axis y, and has two copies along x. The kernel's gradient is summed over
all devices, so it is twice as large as it should be.

Until XLA mends it: compute the gradient as products of slices, as
lingvo_gshard/sharding/windows.py does.
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


def loss(kernel, image, dim):
    return jax.lax.conv(put(image, None, None, dim), kernel, (1,), "SAME").sum()


image = jnp.ones((1, 1, 16))
for name, dim in ("whole", None), ("split", "y"):
    print(name, jax.jit(jax.grad(loss), static_argnums=2)(jnp.ones((1, 1, 3)), image, dim))
