"""The plan of a JAX function for sixteen TPUs that are not at hand.

PYTHONPATH=. python examples/plan_jax_function.py
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import lingvo_gshard as gshard


@jax.jit
def gradient(w, x):
    return jax.grad(lambda w: jnp.square(x @ w).mean())(w)


mesh = AbstractMesh((16,), ("d",), axis_types=(AxisType.Auto,))  # Names and sizes, no devices.
by_rows = NamedSharding(mesh, PartitionSpec("d"))
w = jax.ShapeDtypeStruct((8192, 8192), "bfloat16", sharding=by_rows)
x = jax.ShapeDtypeStruct((4096, 8192), "bfloat16", sharding=by_rows)
print(gshard.plan(gradient, (w, x), "v5e:4x4"))
