"""Compiles a Program for a named TPU topology without a TPU, to be read and not run.

The compiler is XLA's own, from the optional package libtpu (`make setup-tpu`).
"""

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from lingvo_gshard.spmd import executable, specs
from lingvo_gshard.spmd.program import Program

# X, Y and Z count chips. A chip has two devices in generations 2 to 4, and one in the others.
_SIZES = {"v2": "XxY", "v3": "XxY", "v4": "XxYxZ", "v5e": "XxY", "v5p": "XxYxZ", "v6e": "XxY"}
_KNOWN = (
    f"known are {', '.join(f'{generation}:{sizes}' for generation, sizes in _SIZES.items())}; "
    "v3:2x2 is 8 cores, v3:32x32 the 2048 of the paper."
)


class OutOfMemoryError(ValueError):
    """A program needs more memory than a device has.

    `details` is the compiler's message: how much it needs, and its largest buffers.
    """

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class TopologyExecutable(executable.Executable):
    """A program compiled for a topology, with a report and a text.

    It can't be called, and nothing can be placed, since there is no device; both raise ValueError.
    """

    def _placed(self, *_: Any) -> list[jax.Array]:
        raise ValueError(
            f"{self.program.name}: compiled for a topology, it can be read but not run; "
            "executable.compile_program is for devices at hand."
        )


def is_installed() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def devices(name: str) -> list[Any]:
    """The devices of a topology in its own order, such as the 128 cores of `v3:8x8`.

    Raises ValueError if libtpu is not installed or does not know the topology.
    """
    form = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
    if form is None or _SIZES.get(form[1], "").count("x") != form[2].count("x"):
        raise ValueError(f"topology {name!r} is unknown; {_KNOWN}")
    if not is_installed():
        raise ValueError(
            f"topology {name}: the TPU compiler is not installed; `make setup-tpu` installs libtpu."
        )
    # Otherwise libtpu spends minutes asking the cloud's metadata server about this machine.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Otherwise only one process at a time may load libtpu, to guard devices, of which we use none.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"topology {name}: {reason}; {_KNOWN}") from error


def v3(num_cores: int) -> str:
    """The topology of a TPU v3 with that many cores, as square as possible: v3(2048) is `v3:32x32`.

    Raises ValueError unless num_cores is a power of two of 8 or more.
    """
    exponent = num_cores.bit_length() - 1
    if num_cores < 8 or num_cores != 2**exponent:
        raise ValueError(f"A TPU v3 pod has 8, 16, 32, ... cores, not {num_cores}.")
    return f"v3:{2 ** ((exponent - 1) // 2)}x{2 ** (exponent // 2)}"


def chip_places(name: str) -> tuple[tuple[int, ...], ...]:
    """Each device's coordinates of its chip on the torus; ValueError as for `devices`."""
    rank = len(name.split("x"))
    return tuple(tuple(device.coords[:rank]) for device in devices(name))


def compile_program(program: Program, name: str) -> TopologyExecutable:
    """Compiles `program` for the first of a topology's devices.

    Raises OutOfMemoryError if the program needs more memory than a device has, and ValueError as
    `devices`, or if there are fewer devices than partitions, or if they can't run the program.
    """
    found = devices(name)
    if len(found) < program.partitioning.num_partitions:
        raise ValueError(
            f"topology {name}: it has {len(found)} devices, but program {program.name} has "
            f"{program.partitioning.num_partitions} partitions."
        )
    try:
        return TopologyExecutable(program, specs.device_mesh(program.partitioning, found))
    except jax.errors.JaxRuntimeError as error:
        details = str(error)
        message = f"topology {name}: program {program.name}: {details.splitlines()[0]}"
        if details.startswith("RESOURCE_EXHAUSTED"):
            raise OutOfMemoryError(message, details) from error
        raise ValueError(message) from error
