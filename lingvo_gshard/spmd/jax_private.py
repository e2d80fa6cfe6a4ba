"""The names of JAX's inside that this project uses, since JAX has no public ones for them.

Checked with jax 0.10.2 and 0.12.0.1. The tests of spmd/ fail where another version differs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src import clusters, compiler, distributed, hardware_utils, stages, xla_bridge
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client
from jax._src.lib.mlir import ir, passmanager
from jax._src.sharding_impls import num_addressable_indices, parse_flatten_op_sharding

__all__ = ["num_addressable_indices", "parse_flatten_op_sharding"]


def num_tpu_chips() -> int:
    """Returns the number of TPU chips that are attached, without starting JAX."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0]


def has_nvidia_gpu() -> bool:
    """Returns whether an NVIDIA GPU is visible, without starting JAX."""
    return hardware_utils.has_visible_nvidia_gpu()


def has_started() -> bool:
    """Returns whether JAX has started: its platform and number of devices are then fixed."""
    return xla_bridge.backends_are_initialized()


def hlo_sharding(serialized: bytes) -> tuple[str, Any]:
    """Returns the type of a serialized OpSharding in small letters, and its HloSharding.

    TensorFlow's annotations hold such bytes. `other` is one that is tiled.
    """
    sharding = xla_client.OpSharding()
    sharding.ParseFromString(serialized)
    return sharding.type.name.lower(), xla_client.HloSharding.from_proto(sharding)


def detected_processes(timeout_secs: int) -> tuple[str | None, int | None, int | None]:
    """Returns coordinator, number of processes and this one's, as the cluster tells them."""
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    coordinator, count, index, _ = detect(None, None, None, None, None, timeout_secs)
    return coordinator, count, index


def coordination_service(address: str, num_processes: int, heartbeat_timeout_secs: int) -> Any:
    """Starts JAX's coordination service, which lives as long as what is returned.

    It is recoverable: it lists the live processes and does not abort them when one of them dies.
    """
    return _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=heartbeat_timeout_secs, recoverable=True
    )


def join(
    address: str,
    num_processes: int,
    process_id: int,
    init_timeout_secs: int,
    heartbeat_timeout_secs: int,
) -> Any:
    """Joins JAX's distributed runtime, whose service runs elsewhere; returns its client.

    jax.distributed.initialize does the same, but starts the service in process 0.
    """
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=init_timeout_secs,
        use_compression=True,
        heartbeat_timeout=heartbeat_timeout_secs,
    )
    client.connect()

    # jax.devices(), jax.process_index() and jax.distributed.shutdown() look here.
    state = distributed.global_state
    state.client = client
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    return client


# The first bytes of MLIR's bytecode; the name of its producer follows.
_BYTECODE = b"ML\xefR"


def stablehlo_module(source: bytes) -> Any:
    """Returns the ir.Module of StableHLO: a portable artifact, MLIR's bytecode, or its text.

    Raises ValueError, with the parser's first line, if this JAX cannot read it.
    """
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        try:
            if is_portable(source):
                module = _jax.mlir.deserialize_portable_artifact(source)
            else:
                module = ir.Module.parse(source)
            _import_shardings(module)
            return module
        except (ir.MLIRError, ValueError, RuntimeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(lines[-1].strip()) from error


def _import_shardings(module: Any) -> None:
    """Rewrites Shardy's shardings that HLO keeps as text to attributes of Shardy's own."""
    attributes = module.operation.attributes
    kept = "mhlo.frontend_attributes"
    if kept in attributes and "xla.sdy.meshes" in attributes[kept]:
        passes = "builtin.module(xla-sdy-round-trip-import-shardy-attrs)"
        passmanager.PassManager.parse(passes).run(module.operation)


def is_bytecode(source: bytes) -> bool:
    """Returns whether `source` is MLIR's bytecode, which portable artifacts are, too."""
    return source.startswith(_BYTECODE)


def is_portable(source: bytes) -> bool:
    """Returns whether `source` is a portable artifact, as jax.export and StableHLO write them."""
    return source.startswith(_BYTECODE) and b"StableHLO_v" in source[:32]


def hlo_to_stablehlo(serialized: bytes) -> bytes:
    """Returns the StableHLO of a serialized HloModuleProto."""
    converted = _jax.mlir.hlo_to_stablehlo(serialized)
    return converted.encode() if isinstance(converted, str) else bytes(converted)


class _Read(stages.Executable):
    """What XLA compiled, with the analyses that JAX makes of it."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    def xla_extension_executable(self) -> Any:
        return self._executable

    def cost_analysis(self) -> Any:
        # The compiler for GPUs has none without a GPU.
        try:
            return super().cost_analysis()
        except NotImplementedError:
            return None


def compile_stablehlo(module: Any, devices: Sequence[Any], free_results: Sequence[bool]) -> Any:
    """Compiles an ir.Module for `devices`, one a partition, to be read: nothing is loaded.

    `free_results` tells of each result whether the compiler may choose its sharding. Returns what
    hlo_module.read and compiled_report.read take. Raises JaxRuntimeError if it is refused.
    """
    grid = np.array(devices, dtype=object).reshape(1, -1)
    options = compiler.get_compile_options(1, grid.size, device_assignment=grid)
    build_options = options.executable_build_options
    build_options.allow_spmd_sharding_propagation_to_output = list(free_results)

    device_list = xla_client.DeviceList(tuple(devices))
    client = devices[0].client
    return _Read(compiler.backend_compile_and_load(client, module, device_list, options, []))
