"""A fault of XLA's SPMD partitioner: convolutions.

The second line should equal the first; docs/partitioner_faults.md shows it.
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
