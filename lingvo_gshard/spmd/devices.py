"""The devices to compute on: the machine's accelerators, or virtual ones of its CPU."""

import collections
import os

import jax

from lingvo_gshard.spmd import environment, jax_private

_SETUP = "`make setup-cuda12`, `setup-cuda13` and `setup-tpu` install what JAX needs for one"


def find() -> str | None:
    """Returns this machine's accelerators, `tpu` or `cuda`, else `cpu`.

    None leaves the choice to JAX_PLATFORMS, which is set.
    """
    if os.environ.get("JAX_PLATFORMS"):
        return None
    if jax_private.num_tpu_chips():
        return "tpu"
    if jax_private.has_nvidia_gpu():
        return "cuda"
    return "cpu"


def start(num_partitions: int | None = None) -> tuple[int, str]:
    """Starts JAX; returns the number of partitions and `8 x NVIDIA H100 80GB HBM3` or the like.

    There are as many partitions as devices by default. Raises ValueError if JAX can use no device
    of the platform, or has fewer than partitions or, in several processes, more.
    """
    platform = os.environ.get("JAX_PLATFORMS", "cpu").split(",")[0]
    if platform == "tpu" and not jax_private.num_tpu_chips():  # libtpu would log many lines.
        raise _missing(platform, "none is attached")

    try:
        with environment.quiet_stderr():  # A plugin logs that there is no driver.
            devices = jax.devices()
    except RuntimeError as error:
        raise _missing(platform, str(error).splitlines()[0]) from error

    # JAX falls back to the CPU without an error.
    jax_name = "gpu" if platform == "cuda" else platform
    if devices[0].platform != jax_name:
        raise _missing(platform, f"only {devices[0].device_kind}")

    # Several processes must all have work; a single one may leave devices idle.
    description = _described(devices)
    if num_partitions is None:
        return len(devices), description
    if num_partitions > len(devices):
        raise ValueError(f"--num_partitions={num_partitions}: there are only {description}.")
    if num_partitions < len(devices) and jax.process_count() > 1:
        raise ValueError(f"--num_partitions={num_partitions}: expected all of the {description}.")
    return num_partitions, description


def _described(devices: list[jax.Device]) -> str:
    """Returns the number of devices by kind, and that of processes if there are several."""
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
    return ValueError(
        f"--platform={platform}: JAX finds no such device here ({reason}). {_SETUP}; "
        "--platform=cpu does without one."
    )


def check_model(model: str, platform: str) -> None:
    """Raises ValueError for one of the paper's models on a CPU, unless `platform` asks for it."""
    if model.startswith("m4.") and jax.default_backend() == "cpu" and platform != "cpu":
        raise ValueError(
            f"{model} is made for accelerators, and JAX found none. {_SETUP}; --platform=cpu "
            "computes it on virtual CPU devices all the same."
        )
