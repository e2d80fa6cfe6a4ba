"""Eight virtual CPU devices for every test, set before anything loads TensorFlow or JAX.

The compilation cache is off, so that each test compiles its own programs.
"""

import os

from lingvo_gshard.spmd import environment

os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
environment.prepare(num_devices=8)
