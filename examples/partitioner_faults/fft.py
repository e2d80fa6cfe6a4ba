"""A fault of XLA's SPMD partitioner: fourier transforms.

It prints, where the second line should equal the first:

    whole [[5. 0. 0. 0. 0.]]
    LayoutUtil::IsMonotonicWithDim0Major(input_shape_.layout())

The result of a transform is split along the dim that is transformed. A replicated constraint on the
transform does not help. The CPU compiler gives the transform a layout that its own implementation
refuses, so this need not concern other devices.

Until XLA mends it: make the whole result flat and reshape it again before you split it:
whole.reshape(-1).reshape(whole.shape), with put(...) after each step.
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
    return put(put(jnp.abs(jnp.fft.fft(x)), None, dim))


for name, dim in ("whole", None), ("split", "x"):
    print(name, jax.jit(fn, static_argnums=1)(jnp.ones((1, 5)), dim), flush=True)
