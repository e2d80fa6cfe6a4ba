"""A fault of XLA's SPMD partitioner: elements that move in uneven parts.

It prints, where the second line should equal the first:

    whole [0. 1. 0. 0. 2. 0. 0. 3. 0. 0. 4. 0. 0. 5. 0. 0.]
    Slice dim size 2 greater than dynamic slice dimension: 1.

The partitioner writes an instruction that the compiler's own verifier refuses.

Until XLA mends it: constrain the tensor to be whole before it is padded, and the result, too.
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
    return put(put(jax.lax.pad(x, 0.0, [(1, 2, 2)]), dim))


for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(1.0, 6.0), dim))
