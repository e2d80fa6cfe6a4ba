"""The devices to compute on: the machine's accelerators, or virtual CPU devices."""

import collections
import contextlib
import logging
import os
from collections.abc import Iterator

import jax

from lingvo_gshard.spmd import processes
from xla_spmd.runtime import environment, jax_runtime

_LIMIT = "bytes_limit"  # In a device's memory_stats.
_MIB = 2**20
_PLUGINS_LOGGER = "jax._src.xla_bridge"  # It finds and starts the plugins.
_UNKNOWN = "not in the list of known backends"  # In JAX's error about a platform's name.
_chosen_by_environment = False  # Whether JAX_PLATFORMS, and no flag, has chosen the platform.
# The extras and the targets are cuda12, cuda13 and tpu.
_SETUP = (
    "`pip install 'lingvo_gshard[cuda12]'`, or `make setup-cuda12` in a checkout, installs what "
    "JAX needs for such a GPU; cuda13 and tpu are others"
)


def find() -> str | None:
    """Returns this machine's accelerators, `tpu` or `cuda`, or else `cpu`.

    Returns None if JAX_PLATFORMS is set, which then decides.
    """
    if os.environ.get("JAX_PLATFORMS"):
        return None
    if jax_runtime.num_tpu_chips():
        return "tpu"
    if jax_runtime.has_nvidia_gpu():
        return "cuda"
    return "cpu"


def prepare(platform: str, num_partitions: int, num_processes: int = 1) -> None:
    """Prepares this process's share of the partitions on `auto`, `cpu`, `cuda` or `tpu`.

    Raises ValueError if JAX is missing or too old or if a process has less than one device, and
    RuntimeError if JAX has started with fewer devices.
    """
    # None leaves the choice to JAX_PLATFORMS.
    name = find() if platform == "auto" else platform
    global _chosen_by_environment
    _chosen_by_environment = name is None
    environment.prepare(num_partitions // num_processes, name)


def start(num_partitions: int | None = None) -> tuple[int, str]:
    """Starts JAX. Returns the number of partitions and, for example, `8 x NVIDIA H100 80GB HBM3`.

    By default, there are as many partitions as devices. Raises ValueError if JAX cannot use any
    device of the platform, if it has fewer devices than partitions, or if several processes have
    more.
    """
    platform = os.environ.get("JAX_PLATFORMS", "cpu").split(",")[0]
    if platform == "tpu" and not jax_runtime.num_tpu_chips():  # libtpu would log many lines.
        raise _missing(platform, "none is attached")

    with _plugin_errors() as plugin_errors:
        try:
            with environment.quiet_stderr():  # A plugin logs that the driver is missing.
                devices = jax.devices()
        except RuntimeError as error:
            raise _missing(platform, str(error).splitlines()[0]) from error

        # JAX falls back to the CPU without an error.
        jax_name = "gpu" if platform == "cuda" else platform
        if devices[0].platform != jax_name:
            reasons = [f"only {devices[0].device_kind}", *plugin_errors]
            raise _missing(platform, "; ".join(reasons))

    # With several processes, each must have work; a single process may leave devices idle.
    description = _described(devices)
    if num_partitions is None:
        return len(devices), description
    if num_partitions > len(devices):
        raise ValueError(f"--num_partitions={num_partitions}: there are only {description}.")
    if num_partitions < len(devices) and jax.process_count() > 1:
        raise ValueError(f"--num_partitions={num_partitions}: expected all of the {description}.")
    return num_partitions, description


def memory_bytes() -> int:
    """Returns the memory that a program may use on each device, as process 0 sees it, to a MiB.

    It is the limit that JAX reports. CPU devices lack one, and share the memory of their host, or
    of its container, in equal parts. All processes must call it. Raises ValueError if an
    accelerator reports no limit.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if device.platform == "cpu":
        num_devices = jax.local_device_count() * processes.num_on_host()
        num_bytes = environment.memory_bytes() // num_devices
    elif _LIMIT in stats:
        num_bytes = stats[_LIMIT]
    else:
        raise ValueError(
            f"{device.device_kind} reports no {_LIMIT}, which remat=AUTO needs; expected one of "
            "the other values of remat."
        )
    return processes.of_first(num_bytes // _MIB) * _MIB


@contextlib.contextmanager
def _plugin_errors() -> Iterator[list[str]]:
    """Yields a list of the errors of JAX's plugins, which JAX would log with their tracebacks."""
    errors: list[str] = []

    def is_logged(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            errors.append(str(error))
        return error is None

    logger = logging.getLogger(_PLUGINS_LOGGER)
    logger.addFilter(is_logged)
    try:
        yield errors
    finally:
        logger.removeFilter(is_logged)


def _described(devices: list[jax.Device]) -> str:
    """Returns the number of devices of each kind, and the number of processes if above 1."""
    if devices[0].platform == "cpu":
        device_count = _counted(len(devices), "virtual CPU device")
        description = f"{device_count} on {_counted(environment.num_cores(), 'core')}"
    else:
        kinds = collections.Counter(device.device_kind for device in devices)
        description = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())

    if jax.process_count() > 1:
        description += f" in {jax.process_count()} processes"
    return description


def _counted(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _missing(platform: str, reason: str) -> ValueError:
    setting = "JAX_PLATFORMS" if _chosen_by_environment else "--platform"
    if _UNKNOWN in reason:
        return ValueError(
            f"{setting}={platform}: JAX knows no such platform; expected cpu, cuda or tpu. Unset "
            "it to compute on what is here."
        )
    return ValueError(
        f"{setting}={platform}: JAX finds no such device here ({reason}). {_SETUP}; "
        "--platform=cpu works without one."
    )


def check_model(model: str, platform: str) -> None:
    """Raises ValueError for the paper's models on a CPU, unless `platform` requests the CPU."""
    if model.startswith("m4.") and jax.default_backend() == "cpu" and platform != "cpu":
        raise ValueError(
            f"{model} is made for accelerators, and JAX did not find one. {_SETUP}; with "
            "--platform=cpu it runs on virtual CPU devices."
        )
