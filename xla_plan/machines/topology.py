"""Compiles a program for a named topology without such devices: to read it, not to run it.

A TPU's topology counts chips: `v3:32x32`. The data center's network may join several such slices,
whose number follows: `v5e:16x16x4slices`. A topology of GPUs counts the hosts and the GPUs of each
host, which NVLink joins: `h100:32x8`; a rack of GB200 counts as one host. The compilers are XLA's
own, from optional packages: libtpu (`make setup-tpu`), and JAX's CUDA plugin (`make
setup-plan-gpu`).
"""

import contextlib
import importlib.util
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from xla_plan.machines.gpus import GPUS
from xla_plan.program import stablehlo_program
from xla_plan.program.stablehlo_program import StablehloExecutable, StablehloProgram
from xla_spmd.runtime import environment

# The sizes in the name of a TPU's topology; X, Y and Z count chips.
_TPUS = {
    "v2": "XxY",
    "v3": "XxY",
    "v5e": "XxY",
    "v6e": "XxY",
    "v4": "XxYxZ",
    "v5p": "XxYxZ",
    "tpu7x": "XxYxZ",
}
# JAX shows each core as a device.
CORES_PER_CHIP = {"v2": 2, "v3": 2, "v5e": 1, "v6e": 1, "v4": 2, "v5p": 1, "tpu7x": 2}
_SIZES = _TPUS | dict.fromkeys(GPUS, "HOSTSxGPUS")

_FORMS = ", ".join(f"{kind}:{sizes}" for kind, sizes in _SIZES.items())
_KNOWN = (
    f"known are {_FORMS}; v3:2x2 is 8 cores, v3:32x32 the 2048 of the paper, h100:16x8 128 GPUs, "
    "v5e:16x16x4slices 4 times the TPUs of v5e:16x16."
)
_SLICES = "slices"

# Environment variables that libtpu reads when it is loaded.
_LIBTPU = {
    # libtpu would ask the cloud's metadata server for minutes.
    "TPU_SKIP_MDS_QUERY": "1",
    # libtpu would log that it knows neither this machine's kind nor its workers.
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Several processes may load it: its lock guards devices, which compilation does not need.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class OutOfMemoryError(ValueError):
    """A program needs more memory than a device has; its cause has the compiler's whole message."""


def is_gpu(name: str) -> bool:
    """Returns whether a topology consists of GPUs."""
    return name.partition(":")[0] in GPUS


def platform(name: str) -> str:
    """Returns JAX's name for the platform of a topology: `cuda` or `tpu`."""
    return "cuda" if is_gpu(name) else "tpu"


def is_installed(name: str) -> bool:
    """Returns whether the compiler for a topology is installed."""
    modules = ["jax_cuda12_plugin", "jax_cuda13_plugin"] if is_gpu(name) else ["libtpu"]
    return any(importlib.util.find_spec(module) for module in modules)


def devices(name: str) -> list[Any]:
    """Returns a topology's devices, in its order.

    Raises ValueError if the topology is unknown or its compiler is not installed.
    """
    kind, sizes = _kind_and_sizes(name)
    form = re.fullmatch(r"[1-9]\d*(?:x[1-9]\d*)+", sizes)
    is_known = kind in _SIZES and sizes.count("x") == _SIZES[kind].count("x")
    if form is None or not is_known or num_slices(name) == 0:
        raise ValueError(f"topology {name!r} is unknown; {_KNOWN}")

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

    # The compiler knows the possible sizes.
    try:
        found = list(_description(kind, sizes, num_slices(name)).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"topology {name}: {reason}; {_KNOWN}") from error

    # The order is by slice, and within a slice the compiler's own. (JAX calls a GPU host a slice,
    # too.)
    return found if is_gpu(name) else sorted(found, key=_slice_index)


def _slice_index(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0  # A single slice is not numbered.


def num_slices(name: str) -> int:
    """Returns the number of slices in a name, 1 by default; 0 if the text there is not a number."""
    _, _, last = name.rpartition("x")
    if not last.endswith(_SLICES):
        return 1
    number = last.removesuffix(_SLICES)
    is_number = re.fullmatch(r"[1-9]\d*", number) is not None
    return int(number) if is_number and not is_gpu(name) else 0


def _kind_and_sizes(name: str) -> tuple[str, str]:
    """Returns the parts of a name around its colon, without the number of slices."""
    kind, _, sizes = name.partition(":")
    if sizes.endswith(_SLICES):
        sizes = sizes.rpartition("x")[0]
    return kind, sizes


def _description(kind: str, sizes: str, num_slices: int) -> Any:
    """Returns JAX's description of a topology; raises JaxRuntimeError for unknown sizes."""
    if kind in GPUS:
        with environment.quiet_stderr():  # The plugin logs that a driver is missing.
            return topologies.get_topology_desc(
                platform="cuda",
                target_config=GPUS[kind].target_config(),
                # JAX also counts slices: groups of hosts that share a network.
                topology=f"1x{sizes}",
            )

    for variable, value in _LIBTPU.items():
        os.environ.setdefault(variable, value)
    options = {} if num_slices == 1 else {"num_slices": num_slices}
    return topologies.get_topology_desc(topology_name=f"{kind}:{sizes}", platform="tpu", **options)


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


def places(name: str) -> tuple[tuple[int, ...], ...]:
    """Returns each device's chip on the torus, or (host, GPU of the host).

    Raises ValueError if the topology is unknown or its compiler is not installed.
    """
    # JAX numbers the GPUs of one host before the GPUs of the next.
    topology_devices = devices(name)
    if is_gpu(name):
        gpus_per_host = int(name.rpartition("x")[2])
        return tuple(divmod(i, gpus_per_host) for i in range(len(topology_devices)))

    # A 2D torus has coordinates of three dims, too. They are the same in every slice.
    _, sizes = _kind_and_sizes(name)
    num_dims = sizes.count("x") + 1
    return tuple(tuple(device.coords[:num_dims]) for device in topology_devices)


def compile_program(
    program: StablehloProgram,
    name: str,
    order: Sequence[int] | None = None,
    compiler_options: Mapping[str, str] = types.MappingProxyType({}),
) -> StablehloExecutable:
    """Compiles somebody else's program for all of a topology's devices.

    `order` is the number of each partition's device in the topology; None keeps its own order.
    `compiler_options` are XLA's by name.

    Raises OutOfMemoryError if the program needs more memory than a device has. Raises ValueError if
    the topology is unknown, its compiler is not installed, the program is for a different number of
    devices, or the compiler refuses it.
    """
    what = f"topology {name}: program {program.name}"
    topology_devices = devices(name)
    if program.num_partitions != len(topology_devices):
        raise ValueError(
            f"{what}: it is partitioned for {program.num_partitions} devices, and the topology has "
            f"{len(topology_devices)}."
        )
    with one_line_errors(what):
        ordered = topology_devices if order is None else [topology_devices[i] for i in order]
        return stablehlo_program.compile_program(program, ordered, compiler_options)


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Raises OutOfMemoryError or ValueError, prefixed by `what`, for a compiler's refusal."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # The first line states the problem; the others list the largest buffers.
        message = f"{what}: {str(error).splitlines()[0]}"
        if str(error).startswith("RESOURCE_EXHAUSTED"):
            raise OutOfMemoryError(message) from error
        raise ValueError(message) from error
