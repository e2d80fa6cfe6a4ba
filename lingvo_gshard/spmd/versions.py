"""The packages that the code was tested with: versions of JAX, their XLA flags, and extras.

XLA ends the process at a flag that it does not know, so a flag is given only to the versions that
have it.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping

# From the first to below the second; requirements.txt has them by the version of Python.
_JAX = (((0, 10, 2), (0, 11)), ((0, 12, 0, 1), (0, 13)))

# The modules that requirements-train.txt installs. The wheel by itself plans, and has none of them.
_TRAINING = frozenset(
    {
        "array_record",
        "fontTools",
        "ftfy",
        "grain",
        "langcodes",
        "lxml",
        "matplotlib",
        "orbax",
        "polib",
        "py3langid",
        "pyarrow",
        "sacrebleu",
        "sentencepiece",
        "tensorboard",
        "tensorflow",
        "tqdm",
    }
)

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
# A flag, and the first version of jaxlib without it: None if all tested versions have it.
_LAST = {
    "--xla_backend_optimization_level": None,
    "--xla_cpu_collective_call_terminate_timeout_seconds": None,
    "--xla_cpu_parallel_codegen_split_count": None,
    "--xla_cpu_prefer_vector_width": None,
    "--xla_cpu_use_fusion_emitters": (0, 12),
    "--xla_gpu_enable_command_buffer": None,
    "--xla_gpu_enable_latency_hiding_scheduler": None,
    _DEVICE_COUNT: None,
}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_jax() -> None:
    """Raises ValueError if JAX is missing, or its version is none that this was tested with."""
    # Read from the packages' metadata, as importing JAX takes a second.
    found = installed(["jax", "jaxlib"])
    expected = " or ".join(f">={_text(first)},<{_text(beyond)}" for first, beyond in _JAX)
    for package in ("jax", "jaxlib"):
        if package not in found:
            raise ValueError(
                f"{package} is not installed; `pip install lingvo_gshard`, or `make setup` in a "
                "checkout, installs it."
            )

        numbers = _numbers(found[package])
        if not any(first <= numbers < beyond for first, beyond in _JAX):
            raise ValueError(
                f"{package} {found[package]} is installed, but {expected} is expected: "
                f"pip install '{package}{expected.rsplit(' ', 1)[-1]}'."
            )


def advice(error: ModuleNotFoundError) -> str | None:
    """Returns a line on what installs a module that is missing; None if `train` has it not."""
    name, _, _ = (error.name or "").partition(".")
    if name not in _TRAINING:
        return None
    return (
        f"{name} is not installed; `pip install 'lingvo_gshard[train]'`, or `make setup` in a "
        "checkout, installs it."
    )


def known_xla_flags(flags: Mapping[str, str]) -> list[str]:
    """Returns those of our own flags that the installed XLA knows, as `--name=value`."""
    version = _numbers(installed(["jaxlib"]).get("jaxlib", "0"))
    known = []
    for name, value in flags.items():
        beyond = _LAST[name]
        if beyond is None or version < beyond:
            known.append(f"{name}={value}")
    return known


def _numbers(version: str) -> tuple[int, ...]:
    """Returns (0, 12, 0, 1) for `0.12.0.1`, without what follows the numbers."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
