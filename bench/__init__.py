"""Benchmarks, each of which compares alternatives side by side in one run on the same machine.

Importing this package prepares the environment that TensorFlow and JAX read when they are imported,
and imports TensorFlow without its greetings. The peers' environments have neither.
"""

import importlib
import importlib.util

from lingvo_gshard.spmd import environment

if importlib.util.find_spec("tensorflow"):
    environment.prepare()
    with environment.quiet_stderr():
        importlib.import_module("tensorflow")
