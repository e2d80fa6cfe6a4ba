"""The package versions that the code was tested with: JAX, its XLA flags, and extras.

An untested JAX is used nevertheless, unless it is too old to work. XLA ends the process at an
unknown flag, so each version is given only flags that it knows.
"""

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class _Tested:
    """Versions of JAX from `first` to below `beyond`, and the first Python that they support."""

    first: tuple[int, ...]
    beyond: tuple[int, ...]
    python: tuple[int, int]

    def __contains__(self, version: tuple[int, ...]) -> bool:
        return self.first <= version < self.beyond

    def __str__(self) -> str:
        return f">={_text(self.first)},<{_text(self.beyond)}"


# The versions in requirements/plan.txt, by Python. Older ones lack names of jax_names.py.
_JAX = (
    _Tested((0, 10, 2), (0, 11), python=(3, 11)),
    _Tested((0, 12, 0, 1), (0, 13), python=(3, 12)),
)
_OLDEST = _JAX[0].first

JAX = ("jax", "jaxlib")
# The compiler packages of each platform.
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt")}
# The packages whose versions determine the compiled program.
COMPILING = (*JAX, *COMPILERS["tpu"], *COMPILERS["gpu"])

# The modules that requirements/plan.txt and train.txt install.
_REQUIRED = frozenset(
    {
        "absl",
        "array_record",
        "etils",
        "flatbuffers",
        "fontTools",
        "ftfy",
        "google",
        "grain",
        "jax",
        "jaxlib",
        "langcodes",
        "lxml",
        "matplotlib",
        "ml_dtypes",
        "numpy",
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

# Each flag, and the first tested version of jaxlib without it, or None if all have it.
_FLAGS = {
    "--xla_backend_optimization_level": None,
    "--xla_cpu_collective_call_terminate_timeout_seconds": None,
    "--xla_cpu_parallel_codegen_split_count": None,
    "--xla_cpu_prefer_vector_width": None,
    "--xla_cpu_use_fusion_emitters": (0, 12),
    "--xla_gpu_enable_command_buffer": None,
    "--xla_gpu_enable_latency_hiding_scheduler": None,
}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the given packages, as far as they are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_jax() -> str | None:
    """Returns a sentence if the installed JAX was not tested; None if it was.

    Raises ValueError if JAX is missing, or too old to work.
    """
    # Read the packages' metadata, because importing JAX takes a second.
    found = installed(["jax", "jaxlib"])
    untested = []
    for package in ("jax", "jaxlib"):
        if package not in found:
            raise ValueError(
                f"{package} is not installed; `pip install {package}`, or `make setup` in a "
                "checkout, installs it."
            )

        version = _numbers(found[package])
        if version < _OLDEST:
            raise ValueError(
                f"{package} {found[package]} is installed, but {_text(_OLDEST)} or a later one is "
                f"expected: {pip_command(package)}."
            )
        if not _is_tested(version):
            untested.append(f"{package} {found[package]}")

    if not untested:
        return None
    tested = " and ".join(map(str, _JAX))
    return f"lingvo_gshard was not tested with {' and '.join(untested)}, but with {tested}."


def pip_command(*packages: str) -> str:
    """Returns the command that installs the tested versions of JAX's packages for this Python."""
    fitting = [tested for tested in _JAX if tested.python <= sys.version_info[:2]]
    return "pip install " + " ".join(f"'{package}{fitting[-1]}'" for package in packages)


def advice(error: ModuleNotFoundError) -> str | None:
    """Returns a line on how to install a missing module; None if it is not one of ours."""
    name, _, _ = (error.name or "").partition(".")
    if name not in _REQUIRED:
        return None
    return (
        f"{name} is not installed; `pip install lingvo_gshard`, or `make setup` in a "
        "checkout, installs it."
    )


def known_xla_flags(flags: Mapping[str, str]) -> list[str]:
    """Returns the flags among our own that the installed XLA knows, as `--name=value`."""
    version = _numbers(installed(["jaxlib"]).get("jaxlib", "0"))
    if not _is_tested(version):
        return _accepted_by_xla([f"{name}={value}" for name, value in flags.items()])

    known = []
    for name, value in flags.items():
        beyond = _FLAGS[name]
        if beyond is None or version < beyond:
            known.append(f"{name}={value}")
    return known


def _accepted_by_xla(flags: Sequence[str]) -> list[str]:
    """Returns the `--name=value` flags that the installed XLA accepts, found in a child process.

    Returns an empty list if the child ends for a reason other than a flag.
    """
    if not flags:
        return []

    # XLA reads its flags when JAX starts, and aborts with a list of unknown flags.
    child = subprocess.run(
        [sys.executable, "-P", "-c", "import jax; jax.devices()"],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "XLA_FLAGS": " ".join(flags),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if child.returncode == 0:
        return list(flags)
    refusal = re.search("Unknown flags? in XLA_FLAGS: (.*)$", child.stderr, re.MULTILINE)
    if refusal is None:
        return []
    refused = refusal[1].split()
    return [flag for flag in flags if flag not in refused]


def _is_tested(version: tuple[int, ...]) -> bool:
    return any(version in tested for tested in _JAX)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns (0, 12, 0, 1) for `0.12.0.1`, without any text after the numbers."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
