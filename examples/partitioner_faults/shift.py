"""A fault of XLA's SPMD partitioner: irregular pads.

It prints, where the second line should equal the first:

    whole [2. 3. 4. 5. 6. 7. 8. 0.]
    split [1. 2. 3. 4. 5. 6. 7. 8.]

A pad is irregular here if it spreads the elements, with padding between them, or if it cuts
elements off one end. The devices divide all sizes of this program.

The operand is whole, and the result is split. The partitioner returns a part of the operand itself.
If the operand is split as the result is, it is right.

Until XLA mends it: constrain the result of the pad to be whole before it is split.
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
    return put(put(jax.lax.pad(put(x), 0.0, [(-1, 1, 0)]), dim))


for name, dim in ("whole", None), ("split", "y"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(1.0, 9.0), dim), flush=True)
