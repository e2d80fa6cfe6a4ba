"""The flag that chooses a benchmark's platform."""

import os

from absl import flags

from lingvo_gshard.spmd import devices
from xla_spmd.runtime import environment

_PLATFORM = flags.DEFINE_enum("platform", "cpu", ["cpu", "cuda"], "Where ours and the peer run.")

# The share of a GPU's memory that XLA takes when it starts; the peer uses the rest.
_MEMORY_SHARE = 0.45
_SHARE = "XLA_CLIENT_MEM_FRACTION"


def chosen() -> str:
    """Returns `cpu` or `cuda`."""
    return str(_PLATFORM.value)


def start(num_devices: int) -> str:
    """Starts JAX on the platform; returns a description of its devices, like `1 x NVIDIA H100`.

    XLA leaves a part of a GPU's memory to a peer, unless the environment sets XLA's share.
    """
    if os.environ.get(_SHARE) == str(environment.GPU_MEMORY_SHARE):  # The project's own default.
        os.environ[_SHARE] = str(_MEMORY_SHARE)
    environment.prepare(num_devices, chosen())
    _, description = devices.start()
    return description
