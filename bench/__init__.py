"""Benchmarks, each of which compares alternatives side by side in one run on the same machine.

Importing this package prepares the environment that TensorFlow and JAX read when they are imported.
"""

from lingvo_gshard.spmd import environment

environment.prepare()
