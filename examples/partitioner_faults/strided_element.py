"""A fault of XLA's SPMD partitioner: elements that move in uneven parts.

It prints, where the second line should equal the first:

    whole [5.]
    Expected instruction to have shape equal to f32[3], actual shape is f32[1]

The result alone is split: its only element is in one part of eight. The partitioner writes an
instruction that the compiler's own verifier refuses. The same happens if x is split, unevenly or
not, and the result is whole. With stride 1, which gives the same element, both are right.

Until XLA mends it: slice it with stride 1.
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
    return put(put(x[5:6:3], dim))


for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(9.0), dim))
