"""Benchmarks, each of which compares alternatives side by side in one run on the same machine.

Importing this package sets the environment variables that TensorFlow and JAX read when they are
imported, and imports TensorFlow without its startup messages. The peers' environments contain
neither library.
"""

import importlib
import importlib.util

if importlib.util.find_spec("tensorflow"):
    # Not at the top: it imports absl, which the peers' environments lack as well.
    from xla_spmd.runtime import environment

    environment.prepare()
    with environment.quiet_stderr():
        tensorflow = importlib.import_module("tensorflow")
        # Otherwise absl's app.run looks for GPUs, and a missing driver is logged past the filter.
        tensorflow.config.list_physical_devices("GPU")
