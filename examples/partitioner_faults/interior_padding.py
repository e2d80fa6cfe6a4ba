"""A fault of XLA's SPMD partitioner: elements that move in uneven parts.

It prints, where the second line should equal the first:

    whole [1. 0. 2. 0. 3. 0. 4. 0. 5.]
    split [1. 0. 2. 3. 0. 4. 4. 0. 5.]

Padding between elements is the gradient of a strided slice. Here it holds copies of the elements.

Until XLA mends it: constrain the tensor to be whole before it is padded, and the result, too.
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


def fn(x, dim):
    return put(put(jax.lax.pad(x, 0.0, [(0, 0, 1)]), dim))


for name, dim in ("whole", None), ("split", "y"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(1.0, 6.0), dim))
