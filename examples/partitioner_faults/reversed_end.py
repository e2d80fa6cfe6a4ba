"""A fault of XLA's SPMD partitioner: elements that move in uneven parts.

It prints, where the second line should equal the first:

    whole [ 0. 23. 22.]
    split [ 0.  0. 22.]

A slice, a reversal and a pad are the gradient of a symmetric pad. The last three elements are
printed. The element 23 moves by more than one part, and is lost.

Until XLA mends it: constrain the tensor to be whole before its end is reversed, and the result as
well.
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
    last = put(x, dim)[21:23]
    return put(put(jnp.pad(last[::-1], (17, 0)), dim))


for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(1.0, 24.0), dim)[-3:])
