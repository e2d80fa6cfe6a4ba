"""The private names of JAX that this project uses, because JAX lacks public ones for them.

Each name is looked up when it is first needed. So a JAX without some of them still supports all
code that does not need these.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from xla_spmd.runtime import versions

_BOTH = ("0.10.2", "0.12.0.1")
# Each name, and the versions of JAX that are known to have it.
NAMES = {
    "jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params": _BOTH,
    "jax._src.compiler.backend_compile_and_load": _BOTH,
    "jax._src.compiler.get_compile_options": _BOTH,
    "jax._src.distributed.global_state": _BOTH,
    "jax._src.export._export._ensure_backends_initialized": _BOTH,
    "jax._src.export._export._module_to_bytecode": _BOTH,
    "jax._src.export.serialization_generated.DisabledSafetyCheckKind": _BOTH,
    "jax._src.export.serialization_generated.Exported": _BOTH,
    "jax._src.hardware_utils.has_visible_nvidia_gpu": _BOTH,
    "jax._src.hardware_utils.num_available_tpu_chips_and_device_id": _BOTH,
    "jax._src.interpreters.mlir.make_ir_context": _BOTH,
    "jax._src.lib._jax.get_distributed_runtime_client": _BOTH,
    "jax._src.lib._jax.get_distributed_runtime_service": _BOTH,
    "jax._src.lib._jax.mlir.mlir_module_to_xla_computation": _BOTH,
    "jax._src.lib.xla_client.DeviceList": _BOTH,
    "jax._src.lib.xla_client.hlo.hlo_module_from_text": _BOTH,
    "jax._src.sharding_impls.num_addressable_indices": _BOTH,
    "jax._src.xla_bridge.backends_are_initialized": _BOTH,
}


def get(name: str) -> Any:
    """Returns the object with one of NAMES.

    Raises ValueError if the installed JAX does not have it.
    """
    seen_in = NAMES[name]
    owner = _owner(name)
    attribute = name.rpartition(".")[2]
    if not hasattr(owner, attribute):
        raise ValueError(
            f"jax {_installed()} has no {name}, which jax {' and '.join(seen_in)} have: "
            f"{versions.pip_command('jax', 'jaxlib')}."
        )
    return getattr(owner, attribute)


def has(name: str) -> bool:
    """Returns whether the installed JAX has one of NAMES."""
    return hasattr(_owner(name), name.rpartition(".")[2])


@contextlib.contextmanager
def replaced(name: str, replacement: Any) -> Iterator[None]:
    """Replaces the object with one of NAMES, which JAX must have, inside this context."""
    owner = _owner(name)
    attribute = name.rpartition(".")[2]
    original = getattr(owner, attribute)
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def _owner(name: str) -> Any:
    """Returns the module or class that has one of NAMES; None if this JAX lacks it."""
    first, *others, _ = name.split(".")
    owner = importlib.import_module(first)
    path = first

    # Each part is an attribute, or a module that may not be imported yet.
    for part in others:
        path += f".{part}"
        if not hasattr(owner, part):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                return None
        owner = getattr(owner, part)
    return owner


def _installed() -> str:
    return versions.installed(["jax"]).get("jax", "of an unknown version")
