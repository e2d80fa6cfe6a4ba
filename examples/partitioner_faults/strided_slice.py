"""A fault of XLA's SPMD partitioner: elements that move in uneven parts.

It prints, where the second line should equal the first:

    whole [2.]
    split [1.]

The program asks for the second element, and gets the first.

Until XLA mends it: constrain a tensor to be whole along the dim before its elements move, and
constrain the result too.
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
    return put(put(x, dim)[1:2:3])


for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.array([1.0, 2.0]), dim))
