"""The devices to compute on: the machine's accelerators, or virtual ones of its CPU."""

import collections
import os

import jax

from lingvo_gshard.spmd import environment, jax_private

_SETUP = "`make setup-cuda12`, `setup-cuda13` and `setup-tpu` install what JAX needs for one"


def find() -> str | None:
    """This machine's accelerators, `tpu` or `cuda`, else `cpu`; None if JAX_PLATFORMS decides."""
    if os.environ.get("JAX_PLATFORMS"):
        return None
    if jax_private.num_tpu_chips():
        return "tpu"
    return "cuda" if jax_private.has_nvidia_gpu() else "cpu"


def start(num_partitions: int | None = None) -> tuple[int, str]:
    """Starts JAX; returns the number of partitions and `8 x NVIDIA H100 80GB HBM3` or the like.

    There are as many partitions as devices by default. Raises ValueError if JAX can use no device
    of the platform, or has fewer than partitions or, in several processes, more.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "cpu").split(",")[0]
    if wanted == "tpu" and not jax_private.num_tpu_chips():  # libtpu would log many lines.
        raise _missing(wanted, "none is attached")
    try:
        with environment.quiet_stderr():  # A plugin logs that there is no driver.
            found = jax.devices()
    except RuntimeError as error:
        raise _missing(wanted, str(error).splitlines()[0]) from error
    if found[0].platform != ("gpu" if wanted == "cuda" else wanted):
        raise _missing(wanted, f"only {found[0].device_kind}")
    described, partitions = _described(found), num_partitions or len(found)
    if partitions > len(found):
        raise ValueError(f"--num_partitions={partitions}: there are only {described}.")
    if partitions < len(found) and jax.process_count() > 1:
        raise ValueError(f"--num_partitions={partitions}: expected all of the {described}.")
    return partitions, described


def _described(found: list[jax.Device]) -> str:
    kinds = collections.Counter(device.device_kind for device in found)
    described = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if found[0].platform == "cpu":
        devices, cores = len(found), environment.num_cores()
        described = f"{devices} virtual CPU device{'s' * (devices > 1)} on "
        described += f"{cores} core{'s' * (cores > 1)}"
    in_processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return described + in_processes


def _missing(platform: str, found: str) -> ValueError:
    return ValueError(
        f"--platform={platform}: JAX finds no such device here ({found}). {_SETUP}; "
        "--platform=cpu does without one."
    )


def check_model(model: str, platform: str) -> None:
    """Raises ValueError for one of the paper's models on a CPU, unless `platform` asks for it."""
    if model.startswith("m4.") and jax.default_backend() == "cpu" and platform != "cpu":
        raise ValueError(
            f"{model} is made for accelerators, and JAX found none. {_SETUP}; --platform=cpu "
            "computes it on virtual CPU devices all the same."
        )
