"""Eight virtual CPU devices for every test, set before anything loads TensorFlow or JAX.

Each test compiles what it tests: what another run left in the cache shows nothing.
"""

import os

from lingvo_gshard.spmd import environment

os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
environment.prepare(num_devices=8)
