"""A fault of XLA's SPMD partitioner: irregular pads.

It prints, where the second line should equal the first:

    whole [0. 2. 0. 3. 0. 4. 0. 5. 0. 6. 0. 7. 0. 8. 0. 0.]
    Check failed: get_first_valid_element_offset_on_dilated_shard(0) == swd->padding_low()

The operand is split as the result is.

Until XLA mends it: constrain both to be whole, or cut the elements off by a slice.
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
    return put(put(jax.lax.pad(put(x, dim), 0.0, [(-1, 2, 1)]), dim))


for name, dim in ("whole", None), ("split", "y"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.arange(1.0, 9.0), dim), flush=True)
