"""Compiles a Program for a named topology with no such device at hand, to be read and not run.

A TPU's topology counts chips: `v3:32x32`. One of GPUs counts the hosts and the GPUs of each, which
NVLink joins: `h100:32x8`; a rack of GB200 counts as one host. The compilers are XLA's own, from
optional packages: libtpu (`make setup-tpu`), and JAX's CUDA plugin (`make setup-plan-gpu`).
"""

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from lingvo_gshard.spmd import environment, executable, specs
from lingvo_gshard.spmd.gpus import GPUS
from lingvo_gshard.spmd.program import Program

# X, Y and Z count chips.
_TPUS = {
    **dict.fromkeys(("v2", "v3", "v5e", "v6e"), "XxY"),
    **dict.fromkeys(("v4", "v5p", "tpu7x"), "XxYxZ"),
}
CORES_PER_CHIP = {kind: 2 if kind in ("v2", "v3", "v4", "tpu7x") else 1 for kind in _TPUS}
_SIZES = {**_TPUS, **dict.fromkeys(GPUS, "HOSTSxGPUS")}
_KNOWN = (
    f"known are {', '.join(f'{kind}:{sizes}' for kind, sizes in _SIZES.items())}; v3:2x2 is 8 "
    "cores, v3:32x32 the 2048 of the paper, h100:16x8 128 GPUs."
)

# What libtpu reads when it is loaded. The first keeps it from asking the cloud's metadata server
# for minutes, the next two from logging that it knows neither this machine's kind nor its workers.
# The last lets several processes load it; it guards devices, of which compiling needs none.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class OutOfMemoryError(ValueError):
    """A program needs more memory than a device has; its cause has the compiler's whole message."""


class TopologyExecutable(executable.Executable):
    """A program compiled for a topology, to be read: a call or `place` raises ValueError."""

    def _placed(self, *_: Any) -> list[jax.Array]:
        raise ValueError(
            f"{self.program.name}: compiled for a topology, it can be read but not run; "
            "executable.compile_program is for devices at hand."
        )


def is_gpu(name: str) -> bool:
    """Whether a topology is one of GPUs."""
    return name.partition(":")[0] in GPUS


def is_installed(name: str) -> bool:
    """Whether the compiler for a topology is installed."""
    if not is_gpu(name):
        return importlib.util.find_spec("libtpu") is not None
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def devices(name: str) -> list[Any]:
    """A topology's devices, in its order; ValueError if it is unknown or lacks its compiler."""
    form = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)+)", name)
    if form is None or _SIZES.get(form[1], "").count("x") != form[2].count("x"):
        raise ValueError(f"topology {name!r} is unknown; {_KNOWN}")
    if not is_installed(name):
        kind, target = ("GPU", "setup-plan-gpu") if is_gpu(name) else ("TPU", "setup-tpu")
        raise ValueError(
            f"topology {name}: the {kind} compiler is not installed; `make {target}` installs it."
        )
    try:
        return list(_description(*form.groups()).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"topology {name}: {reason}; {_KNOWN}") from error


def _description(kind: str, sizes: str) -> Any:
    if kind in GPUS:  # JAX counts slices, too: groups of hosts with a network of their own.
        target = GPUS[kind].target_config()
        with environment.quiet_stderr():  # The plugin logs that there is no driver.
            return topologies.get_topology_desc(
                platform="cuda", target_config=target, topology=f"1x{sizes}"
            )
    for variable, value in _LIBTPU.items():
        os.environ.setdefault(variable, value)
    return topologies.get_topology_desc(topology_name=f"{kind}:{sizes}", platform="tpu")


def tpu(kind: str, num_cores: int) -> str:
    """The topology of that many cores, as near to a square or cube as possible.

    tpu("v3", 2048) is `v3:32x32`. ValueError unless it is a power of two from 8.
    """
    if num_cores < 8 or num_cores & (num_cores - 1):
        raise ValueError(f"A TPU pod has 8, 16, 32, ... cores, not {num_cores}.")
    dims = _TPUS[kind].count("x") + 1
    exponent = (num_cores // CORES_PER_CHIP[kind]).bit_length() - 1
    sides = [2 ** ((exponent + dim) // dims) for dim in range(dims)]
    sides.sort(key=lambda side: side == 1)  # A host has 2x2x1 chips.
    return f"{kind}:{'x'.join(map(str, sides))}"


def places(name: str) -> tuple[tuple[int, ...], ...]:
    """Each device's chip on the torus, or (host, GPU of the host); ValueError as `devices`."""
    found = devices(name)
    if is_gpu(name):
        gpus_per_host = int(name.rpartition("x")[2])
        return tuple(divmod(i, gpus_per_host) for i in range(len(found)))
    rank = len(name.split("x"))
    return tuple(tuple(device.coords[:rank]) for device in found)


def compile_program(
    program: Program, name: str, options: dict[str, str | bool] | None = None
) -> TopologyExecutable:
    """Compiles `program` for the first of a topology's devices, with `options` of the compiler.

    Raises OutOfMemoryError if the program needs more memory than a device has, and ValueError as
    `devices`, or if there are fewer devices than partitions, or if they can't run the program.
    """
    what = f"topology {name}: program {program.name}"
    mesh = specs.device_mesh(program.partitioning, devices(name), what)
    try:
        compiled = executable.lower(program, mesh).compile(compiler_options=options)
        return TopologyExecutable(program, mesh, compiled)
    except jax.errors.JaxRuntimeError as error:
        message = f"{what}: {str(error).splitlines()[0]}"
        kind = OutOfMemoryError if str(error).startswith("RESOURCE_EXHAUSTED") else ValueError
        raise kind(message) from error
