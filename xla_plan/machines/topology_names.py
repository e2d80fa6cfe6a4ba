"""The names of topologies, such as `v3:32x32`; they are checked before JAX is imported.

A TPU's topology counts chips: `v3:32x32`. The data center's network may join several such slices,
whose number follows: `v5e:16x16x4slices`. A topology of GPUs counts the hosts and the GPUs of each
host, which NVLink joins: `h100:32x8`; a rack of GB200 counts as one host.
"""

import importlib.util
import math
import re

from xla_plan.machines import published

# How the name of a topology gives its sizes; a TPU has sizes in chips.
_TPUS = {name: figures["sizes"] for name, figures in published.TPUS.items()}
# JAX shows each core as a device.
CORES_PER_CHIP = {name: figures["cores_per_chip"] for name, figures in published.TPUS.items()}
_SIZES = _TPUS | dict.fromkeys(published.GPUS, "HOSTSxGPUS")

# The machines that are compared: the most devices of a pod, and the GPUs of a host.
_COMPARED_TPUS = {"v3": 2048, "v4": 8192, "v5e": 256, "v5p": 8192, "v6e": 256, "tpu7x": 16384}
_COMPARED_GPUS = {"a100": 8, "h100": 8, "h200": 8, "b200": 8, "gb200": 64}

_FORMS = ", ".join(f"{kind}:{sizes}" for kind, sizes in _SIZES.items())
KNOWN = (
    f"known are {_FORMS}; v3:2x2 is 8 cores, v3:32x32 the 2048 of the paper, h100:16x8 128 GPUs, "
    "v5e:16x16x4slices 4 times the TPUs of v5e:16x16."
)
_SLICES = "slices"


def is_gpu(name: str) -> bool:
    """Returns whether a topology consists of GPUs."""
    return name.partition(":")[0] in published.GPUS


def is_installed(name: str) -> bool:
    """Returns whether the compiler for a topology is installed."""
    modules = ["jax_cuda12_plugin", "jax_cuda13_plugin"] if is_gpu(name) else ["libtpu"]
    return any(importlib.util.find_spec(module) for module in modules)


def check(name: str) -> None:
    """Raises ValueError if a topology is unknown or its compiler is not installed.

    Only the compiler knows which of the sizes are possible.
    """
    kind, sizes = kind_and_sizes(name)
    form = re.fullmatch(r"[1-9]\d*(?:x[1-9]\d*)+", sizes)
    is_known = kind in _SIZES and sizes.count("x") == _SIZES[kind].count("x")
    if form is None or not is_known or num_slices(name) == 0:
        raise ValueError(f"topology {name!r} is unknown; {KNOWN}")

    # This message is better than JAX's, which names a plugin.
    if not is_installed(name):
        if is_gpu(name):
            compiler = "GPU"
            extra = "plan-gpu"
            target = "setup-plan-gpu"
        else:
            compiler = "TPU"
            extra = "plan"
            target = "setup-tpu"
        raise ValueError(
            f"topology {name}: the {compiler} compiler is not installed; `pip install "
            f"'lingvo_gshard[{extra}]'`, or `make {target}` in a checkout, installs it."
        )


def num_slices(name: str) -> int:
    """Returns the number of slices in a name, 1 by default; 0 if the text there is not a number."""
    _, _, last = name.rpartition("x")
    if not last.endswith(_SLICES):
        return 1
    number = last.removesuffix(_SLICES)
    is_number = re.fullmatch(r"[1-9]\d*", number) is not None
    return int(number) if is_number and not is_gpu(name) else 0


def num_devices(name: str) -> int:
    """Returns the number of devices of a topology whose name `check` accepts."""
    kind, sizes = kind_and_sizes(name)
    devices_per_slice = math.prod(map(int, sizes.split("x"))) * CORES_PER_CHIP.get(kind, 1)
    return devices_per_slice * num_slices(name)


def kind_and_sizes(name: str) -> tuple[str, str]:
    """Returns the parts of a name around its colon, without the number of slices."""
    kind, _, sizes = name.partition(":")
    if sizes.endswith(_SLICES):
        sizes = sizes.rpartition("x")[0]
    return kind, sizes


def tpu(kind: str, num_cores: int) -> str:
    """Returns the topology with `num_cores` cores that is as near to a square or cube as possible.

    tpu("v3", 2048) is `v3:32x32`. Raises ValueError unless `num_cores` is a power of two of at
    least 8.
    """
    # The smallest slice is one host of 4 chips with 2 cores each.
    if num_cores < 8 or num_cores & (num_cores - 1):
        raise ValueError(f"A TPU pod has 8, 16, 32, ... cores, not {num_cores}.")

    num_dims = _TPUS[kind].count("x") + 1
    num_chips = num_cores // CORES_PER_CHIP[kind]
    log2_chips = num_chips.bit_length() - 1
    # The exponents of the sides are equal, or the last ones are larger by 1.
    sides = [2 ** ((log2_chips + dim) // num_dims) for dim in range(num_dims)]

    # A host has 2x2x1 chips, so a side of 1 comes last.
    sides.sort(key=lambda side: side == 1)
    return f"{kind}:{'x'.join(map(str, sides))}"


def compared(num_devices: int) -> list[str]:
    """Returns the machines with `num_devices` devices, a power of two of at least 8.

    TPUs are as near to cubes as possible.
    """
    names = []
    for kind, most_devices in _COMPARED_TPUS.items():
        if num_devices <= most_devices:
            names.append(tpu(kind, num_devices))

    # A host is filled before the next one is used.
    for kind, gpus_per_host in _COMPARED_GPUS.items():
        gpus = min(gpus_per_host, num_devices)
        names.append(f"{kind}:{num_devices // gpus}x{gpus}")
    return names
