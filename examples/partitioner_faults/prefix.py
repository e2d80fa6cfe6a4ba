"""A fault of XLA's SPMD partitioner: a prefix beside the tensor itself.

It prints, where the second line should equal the first:

    whole [1. 2. 3.]
    Expected instruction to have shape equal to f32[1], actual shape is f32[6]

The first elements stay where they are, and every part is as large as before: one element. Both
tensors are made whole. It seems that the partitioner takes the whole x, of six elements, for the
whole of its first one, because both have the same parts. The gradients of jnp.concatenate and of a
pad that mirrors have such pairs.

Until XLA mends it: constrain x to be whole before all its slices.
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


def fn(x, dim):
    x = put(x, dim)
    return put(x[:1]) + put(x)[1:4]


for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(6.0), dim), flush=True)
