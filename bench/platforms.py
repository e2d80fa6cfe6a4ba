"""The flag that chooses what a benchmark computes on."""

import os

from absl import flags

from lingvo_gshard.spmd import devices, environment

_PLATFORM = flags.DEFINE_enum("platform", "cpu", ["cpu", "cuda"], "What ours and a peer run on.")

# XLA's share of a GPU's memory, which it takes at its start. A peer has the rest.
_MEMORY_SHARE = 0.45
_SHARE = "XLA_CLIENT_MEM_FRACTION"


def chosen() -> str:
    """Returns `cpu` or `cuda`."""
    return str(_PLATFORM.value)


def start(num_devices: int) -> str:
    """Starts JAX on the platform; returns what its devices are, such as `1 x NVIDIA H100`.

    A peer shares a GPU's memory, unless the environment has a share for XLA.
    """
    if os.environ.get(_SHARE) == str(environment.GPU_MEMORY_SHARE):  # The project's own default.
        os.environ[_SHARE] = str(_MEMORY_SHARE)
    environment.prepare(num_devices, chosen())
    _, description = devices.start()
    return description
