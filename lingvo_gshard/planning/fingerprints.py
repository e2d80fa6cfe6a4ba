"""Fingerprints of what a plan depends on: what is planned, this library, the compilers."""

import os
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.files import digests
from lingvo_gshard.spmd import saved_executable, versions

# Environment variables that hold options of the compilers: LIBTPU_INIT_ARGS are the TPU's.
_COMPILER_OPTIONS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
# How many devices a process has on its CPU; compilers for a topology do not read it.
_DEVICE_COUNT = "--xla_force_host_platform_device_count="


def of(*planned: Any, code: Sequence[str] = ()) -> str:
    """Returns a digest of JSON-able values, the library's code, and the compilers with options.

    `code` names the modules and packages that the plan depends on, if it is not the whole library.
    """
    compilers = versions.installed(saved_executable.PACKAGES)
    return digests.of_json(planned, compilers, _compiler_options(), digests.of_library(*code))


def _compiler_options() -> dict[str, list[str]]:
    """Returns the compilers' options by variable, in the order given: the last of equals holds."""
    options = {}
    for variable in _COMPILER_OPTIONS:
        words = os.environ.get(variable, "").split()
        options[variable] = [word for word in words if not word.startswith(_DEVICE_COUNT)]
    return options
