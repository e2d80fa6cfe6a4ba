"""Fingerprints of everything that a plan depends on: the program, this library, the compilers."""

import os
from collections.abc import Sequence
from typing import Any

from xla_spmd.files import digests
from xla_spmd.runtime import versions

# Environment variables that hold options of the compilers; LIBTPU_INIT_ARGS has the TPU's.
_COMPILER_OPTIONS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
# The number of CPU devices of a process, which compilers for a topology do not read.
_DEVICE_COUNT = "--xla_force_host_platform_device_count="


def of(*planned: Any, code: Sequence[str] = ()) -> str:
    """Returns a digest of JSON-able values, the library's code, and the compilers with options.

    `code` names the modules and packages that the plan depends on, if it is not the whole library.
    """
    compilers = versions.installed(versions.COMPILING)
    return digests.of_json(planned, compilers, _compiler_options(), digests.of_library(*code))


def _compiler_options() -> dict[str, list[str]]:
    """Returns the compilers' options by variable, in their order: the last of equal ones counts."""
    options = {}
    for variable in _COMPILER_OPTIONS:
        words = os.environ.get(variable, "").split()
        options[variable] = [word for word in words if not word.startswith(_DEVICE_COUNT)]
    return options
