"""Eight virtual CPU devices for every test, set before anything loads TensorFlow or JAX."""

from lingvo_gshard.spmd import environment

environment.prepare(num_devices=8)
