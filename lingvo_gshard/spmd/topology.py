"""Named TPU topologies: a Program is compiled for one with no TPU at hand, to read, not to run.

The compiler is XLA's own, from the optional package libtpu (`make setup-tpu`).
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import executable, specs
from lingvo_gshard.spmd.program import Program

# Chips along each dimension of the torus. Generations 2 to 4 have two devices a chip, others one.
_FORMS = "v2:XxY, v3:XxY, v4:XxYxZ, v5e:XxY, v5p:XxYxZ, v6e:XxY"
_FLAT = ("v2", "v3", "v5e", "v6e")
_TORUS = ("v4", "v5p")
_EXAMPLES = "v3:2x2 is 8 cores, v3:32x32 the 2048 of the paper"


class OutOfMemoryError(ValueError):
    """A program that needs more memory than a device has.

    Attributes:
      details: what the compiler says of it: how much it needs, and its largest buffers.
    """

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class TopologyExecutable(executable.Executable):
    """A program compiled for a topology: its report and text can be read; to run it is refused."""

    def __call__(self, *args: NestedMap) -> NestedMap:
        """ValueError: there is no device to run on."""
        raise ValueError(self._refusal())

    def place(self, name: str, tree: NestedMap) -> NestedMap:
        """ValueError: there is no device to place anything on."""
        raise ValueError(self._refusal())

    def _refusal(self) -> str:
        return (
            f"{self.program.name}: compiled for a topology, it can be read but not run; "
            "executable.compile_program is for devices at hand."
        )


def is_installed() -> bool:
    """Whether the TPU compiler is."""
    return importlib.util.find_spec("libtpu") is not None


def devices(name: str) -> list[Any]:
    """The devices of a topology, in its own order, such as `v3:8x8`'s 128 cores.

    Raises:
      ValueError: libtpu is not installed, or it knows no such topology.
    """
    _check_form(name)
    if not is_installed():
        raise ValueError(
            f"topology {name}: the TPU compiler is not installed; `make setup-tpu` installs libtpu."
        )
    # Else libtpu asks the cloud's metadata server, for minutes, which machine this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Else libtpu lets one process at a time load it, which guards devices; here are none.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"topology {name}: {reason}; known are {_FORMS}; {_EXAMPLES}.") from error


def v3(num_cores: int) -> str:
    """The TPU v3 of that many cores that is the nearest to a square: 2048 are `v3:32x32`.

    Raises:
      ValueError: not a power of two from 8 on.
    """
    exponent = num_cores.bit_length() - 1
    if num_cores < 8 or num_cores != 2**exponent:
        raise ValueError(f"A TPU v3 pod has 8, 16, 32, ... cores, not {num_cores}.")
    return f"v3:{2 ** ((exponent - 1) // 2)}x{2 ** (exponent // 2)}"


def chip_places(name: str) -> tuple[tuple[int, ...], ...]:
    """Of each device, in their order, its chip's place on the torus; ValueError as `devices`."""
    rank = len(name.split("x"))
    return tuple(tuple(device.coords[:rank]) for device in devices(name))


def compile_program(program: Program, name: str) -> TopologyExecutable:
    """Compiles `program` for the first of a topology's devices.

    Raises:
      OutOfMemoryError: the program needs more memory than a device has.
      ValueError: as `devices`; the topology has fewer devices than the program partitions; or the
        program needs what no device of this kind can do.
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


def _check_form(name: str) -> None:
    found = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
    rank = {**dict.fromkeys(_FLAT, 2), **dict.fromkeys(_TORUS, 3)}
    if found is None or rank.get(found[1]) != len(found[2].split("x")):
        raise ValueError(f"topology {name!r} is unknown; known are {_FORMS}; {_EXAMPLES}.")
