"""Compiles a program for a named topology without such devices: to read it, not to run it.

topology_names.py has the names. The compilers are XLA's own, from optional packages: libtpu (`make
setup-tpu`), and JAX's CUDA plugin (`make setup-plan-gpu`).
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from xla_plan.machines import topology_names
from xla_plan.machines.gpus import GPUS
from xla_plan.machines.topology_names import is_gpu as is_gpu
from xla_plan.machines.topology_names import is_installed as is_installed
from xla_plan.machines.topology_names import num_slices as num_slices
from xla_plan.machines.topology_names import tpu as tpu
from xla_plan.program import stablehlo_program
from xla_plan.program.stablehlo_program import StablehloExecutable, StablehloProgram
from xla_spmd.runtime import environment

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


def platform(name: str) -> str:
    """Returns JAX's name for the platform of a topology: `cuda` or `tpu`."""
    return "cuda" if is_gpu(name) else "tpu"


def devices(name: str) -> list[Any]:
    """Returns a topology's devices, in its order.

    Raises ValueError if the topology is unknown or its compiler is not installed.
    """
    topology_names.check(name)

    # The compiler knows the possible sizes.
    kind, sizes = topology_names.kind_and_sizes(name)
    try:
        found = list(_description(kind, sizes, num_slices(name)).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"topology {name}: {reason}; {topology_names.KNOWN}") from error

    # The order is by slice, and within a slice the compiler's own. (JAX calls a GPU host a slice,
    # too.)
    return found if is_gpu(name) else sorted(found, key=_slice_index)


def _slice_index(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0  # A single slice is not numbered.


def _description(kind: str, sizes: str, num_slices: int) -> Any:
    """Returns JAX's description of a topology; raises JaxRuntimeError for unknown sizes."""
    if kind in GPUS:
        describe = functools.partial(
            topologies.get_topology_desc,
            platform="cuda",
            target_config=GPUS[kind].target_config(),
            # JAX also counts slices: groups of hosts that share a network.
            topology=f"1x{sizes}",
        )
        with environment.quiet_stderr():  # The plugin logs that a driver is missing.
            try:
                return describe()
            except NotImplementedError:
                _add_cuda_plugin()
                return describe()

    for variable, value in _LIBTPU.items():
        os.environ.setdefault(variable, value)
    options = {} if num_slices == 1 else {"num_slices": num_slices}
    return topologies.get_topology_desc(topology_name=f"{kind}:{sizes}", platform="tpu", **options)


def _add_cuda_plugin() -> None:
    """Adds the CUDA plugin to JAX, which left it out for want of libraries that compute on GPUs."""
    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    given = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        for module in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
            if importlib.util.find_spec(module):
                importlib.import_module(module).initialize()
    finally:
        del os.environ[variable]
        if given is not None:
            os.environ[variable] = given


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
    _, sizes = topology_names.kind_and_sizes(name)
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
