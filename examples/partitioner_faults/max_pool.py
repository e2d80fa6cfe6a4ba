"""A fault of XLA's SPMD partitioner: windows that overlap.

It prints, where the second line should equal the first:

    whole [1. 0. 1. 2. 1. 0. 2. 1. 0. 2. 1. 0. 2. 0. 2. 0.]
    split [0. 1. 1. 2. 1. 0. 2. 1. 0. 2. 1. 0. 2. 0. 2. 0.]

The maximum of the first window, 3, is the first element, and its gradient goes to the second one.
The windows at the edges of parts belong to two parts.

Until XLA mends it: take maxima of slices.
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


def loss(x, dim):
    window = jax.lax.reduce_window(put(x, dim), -jnp.inf, jax.lax.max, (2,), (1,), "VALID")
    return window.sum()


x = jnp.array([3.0, 1, 2, 5, 4, 0, 7, 6, 2, 9, 8, 1, 5, 3, 4, 0])
for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(jax.grad(loss), static_argnums=1)(x, dim))
