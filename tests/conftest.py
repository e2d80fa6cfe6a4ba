"""Eight virtual CPU devices for every test, set before anything loads TensorFlow or JAX.

All processes of a test run share a cache of compiled programs, which is empty at its start.
"""

import os
import tempfile

from lingvo_gshard.spmd import environment

if "PYTEST_XDIST_WORKER" not in os.environ:  # Workers inherit the environment of the first process.
    _cache = tempfile.TemporaryDirectory(prefix="lingvo_gshard_test_cache_")
    os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = _cache.name
environment.prepare(num_devices=8)
