"""A fault of XLA's SPMD partitioner: a reshape to fewer dims.

It prints one line, and then ends the process:

    whole [0. 5.]
    Fatal Python error: Segmentation fault

The middle dim of 25 elements is split in two parts, unevenly, and becomes two dims, of which the
first one is split. With shapes (1, 25), (25, 1) or (1, 5, 5) in place of (1, 25, 1) or (5, 5), the
result is right, and so it is with 20 elements.

Until XLA mends it: constrain the tensor to be whole before it is reshaped.
"""

import faulthandler

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

faulthandler.enable()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


def put(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*dims)))


def reshape(a, dim):
    return put(put(a, None, dim, None).reshape(5, 5), dim, None)[:2, 0]


for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(reshape, static_argnums=1)(jnp.arange(25.0).reshape(1, 25, 1), dim))
