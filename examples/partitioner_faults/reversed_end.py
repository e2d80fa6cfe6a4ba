"""A fault of XLA's SPMD partitioner: elements that move in uneven parts.

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


def fn(x, dim):
    last = put(x, dim)[21:23]
    return put(put(jnp.pad(last[::-1], (17, 0)), dim))


for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(1.0, 24.0), dim)[-3:])
