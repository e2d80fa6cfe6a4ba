"""The names of JAX's inside that this project uses, since JAX has no public ones for them.

Checked with jax 0.10.2 and 0.12.0.1. The tests of spmd/ fail where another version differs.
"""

import contextlib
import dataclasses
import io
import os
import re
import struct
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export as jax_export
from jax._src import clusters, compiler, distributed, hardware_utils, stages, xla_bridge
from jax._src.export import _export, serialization_generated
from jax._src.interpreters import mlir
from jax._src.lib import _jax, xla_client
from jax._src.lib.mlir import ir, passmanager
from jax._src.lib.mlir.dialects import hlo
from jax._src.sharding_impls import num_addressable_indices, parse_flatten_op_sharding

__all__ = ["ir", "num_addressable_indices", "parse_flatten_op_sharding"]


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


# What JAX calls before it lowers a call of an export. Earlier versions have no such function.
_INITIALIZER = "_ensure_backends_initialized"
_lapack_is_left_out = threading.Lock()


@contextlib.contextmanager
def loading_lapack_if_called(exported: bytes) -> Iterator[None]:
    """Lets JAX lower a call of this export, in this context, without LAPACK if it calls none of it.

    JAX loads LAPACK for any export, and SciPy with it: 0.2 s of a start.
    """
    # The bytecode holds the names of custom calls as they are, such as lapack_sgeqrf_ffi.
    if b"lapack_" in exported or not hasattr(_export, _INITIALIZER):
        yield
        return

    # Another thread's export may need it.
    with _lapack_is_left_out:
        initialize = getattr(_export, _INITIALIZER)
        setattr(_export, _INITIALIZER, lambda platforms: None)
        try:
            yield
        finally:
            setattr(_export, _INITIALIZER, initialize)


# The first bytes of MLIR's bytecode; the name of its producer follows.
_BYTECODE = b"ML\xefR"
_PORTABLE = re.compile(rb"ML\xefR.StableHLO_v(\d+\.\d+\.\d+)\0", re.DOTALL)


def stablehlo_module(source: bytes) -> Any:
    """Returns the ir.Module of StableHLO: a portable artifact, MLIR's bytecode, or its text.

    Raises ValueError, with the parser's reason, if this JAX cannot read it.
    """
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        try:
            if is_portable(source):
                module = _portable_module(source)
            else:
                module = ir.Module.parse(source)
            _import_shardings(module)
            _remove_copies(module)
            return module
        except (ir.MLIRError, ValueError, RuntimeError) as error:
            raise ValueError(_reason(str(error))) from error


def _portable_module(source: bytes) -> Any:
    """Returns the ir.Module of a portable artifact; ValueError if this JAX cannot read it."""
    newest: str = hlo.get_current_version()
    version = _PORTABLE.match(source)
    assert version is not None  # is_portable has seen it.
    its_version = version[1].decode()
    if _numbers(its_version) > _numbers(newest):
        raise ValueError(f"it is of StableHLO {its_version}, expected {newest} or older")

    # The parser writes its reasons to the descriptor of standard error.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as reasons:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(reasons.fileno(), 2)
        try:
            return _jax.mlir.deserialize_portable_artifact(source)
        except (ValueError, RuntimeError) as error:
            reasons.seek(0)
            raise ValueError(_reason(reasons.read())) from error
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def bytecode(module: Any) -> bytes:
    """Returns an ir.Module as MLIR's bytecode, with its locations, which stablehlo_module reads."""
    written = io.BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


def _import_shardings(module: Any) -> None:
    """Rewrites Shardy's shardings that HLO keeps as text to attributes of Shardy's own."""
    attributes = module.operation.attributes
    kept = "mhlo.frontend_attributes"
    if kept in attributes and "xla.sdy.meshes" in attributes[kept]:
        passes = "builtin.module(xla-sdy-round-trip-import-shardy-attrs)"
        passmanager.PassManager.parse(passes).run(module.operation)


def _remove_copies(module: Any) -> None:
    """Removes HLO's copies, which StableHLO does not have; XLA adds those that a program needs."""
    copies = []

    def collect(operation: Any) -> Any:
        if operation.name == "mhlo.copy":
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for copy in copies:
        copy.results[0].replace_all_uses_with(copy.operands[0])
        copy.operation.erase()


def _reason(message: str) -> str:
    """Returns the line of a parser's message that says what is wrong, without its place."""
    lines = message.strip().splitlines() or ["it is damaged"]
    for line in lines:
        _, is_reason, reason = line.partition("error: ")
        if is_reason:
            return reason.strip(" :")
    return lines[-1].strip()


def is_bytecode(source: bytes) -> bool:
    """Returns whether `source` is MLIR's bytecode, which portable artifacts are, too."""
    return source.startswith(_BYTECODE)


def is_portable(source: bytes) -> bool:
    """Returns whether `source` is a portable artifact, as jax.export and StableHLO write them."""
    return _PORTABLE.match(source) is not None


@dataclasses.dataclass(frozen=True)
class ExportedModule:
    """What a file of jax.export says of its program."""

    platforms: tuple[str, ...]
    is_for_any_platform: bool
    stablehlo: bytes  # A portable artifact.


def exported_module(source: bytes) -> ExportedModule:
    """Reads a file of jax.export, but for its trees, whose types may be those of any library.

    Raises ValueError, with the reason, if it is no such file or of a version that JAX cannot read.
    """
    # These bytes have no mark of their kind: those of other files are read as if they were offsets.
    try:
        fields = serialization_generated.Exported.GetRootAs(source)
        version = fields.CallingConventionVersion()
        platforms = [fields.Platforms(i).decode() for i in range(fields.PlatformsLength())]
        checks = [fields.DisabledChecks(i) for i in range(fields.DisabledChecksLength())]
        kinds = [check.Kind() for check in checks]
        stablehlo = fields.MlirModuleSerializedAsNumpy()
    except (AttributeError, IndexError, TypeError, ValueError, struct.error) as error:
        raise ValueError("it is no file of jax.export, or was cut short") from error
    if not isinstance(stablehlo, np.ndarray) or not is_bytecode(stablehlo[:4].tobytes()):
        raise ValueError("it is no file of jax.export, or was cut short")

    first = jax_export.minimum_supported_calling_convention_version
    last = jax_export.maximum_supported_calling_convention_version
    if not first <= version <= last:
        raise ValueError(
            f"it has version {version} of jax.export's calling convention, expected {first} to "
            f"{last}"
        )
    any_platform = serialization_generated.DisabledSafetyCheckKind.platform
    return ExportedModule(tuple(platforms), any_platform in kinds, stablehlo.tobytes())


def hlo_from_text(text: bytes) -> bytes:
    """Returns the serialized HloModuleProto of HLO's text.

    Raises ValueError, with the parser's reason, if this JAX cannot read it.
    """
    try:
        module = xla_client.hlo.hlo_module_from_text(text.decode())
    except (UnicodeDecodeError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(_reason(str(error))) from error
    serialized: bytes = module.as_serialized_hlo_module_proto()
    return serialized


def hlo_to_stablehlo(serialized: bytes) -> bytes:
    """Returns the StableHLO of a serialized HloModuleProto.

    Raises ValueError, with the reason, if it has none.
    """
    try:
        converted = _jax.mlir.hlo_to_stablehlo(serialized)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(_reason(str(error))) from error
    return converted.encode() if isinstance(converted, str) else bytes(converted)


def donate(module: Any, numbers: Collection[int]) -> None:
    """Gives the results of an ir.Module's main function the memory of some of its arguments.

    HLO keeps these numbers, and hlo_to_stablehlo leaves them out.
    """
    if not numbers:
        return
    with module.context:
        main: Any = ir.SymbolTable(module.operation)["main"]
        given: Any = main.operation.attributes
        attributes = list(given["arg_attrs"]) if "arg_attrs" in given else []
        attributes = attributes or [ir.DictAttr.get({})] * len(main.arguments)
        for number in numbers:
            kept = [attributes[number][i] for i in range(len(attributes[number]))]
            named = {attribute.name: attribute.attr for attribute in kept}
            named["jax.buffer_donor"] = ir.BoolAttr.get(True)
            attributes[number] = ir.DictAttr.get(named)
        main.operation.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


_NUMBERS = (
    hlo.DotDimensionNumbers,
    hlo.ConvDimensionNumbers,
    hlo.GatherDimensionNumbers,
    hlo.ScatterDimensionNumbers,
)


def dimension_numbers(attribute: Any) -> Any:
    """Returns the dimension numbers of a StableHLO operation with their fields, by its kind."""
    (kind,) = [kind for kind in _NUMBERS if kind.isinstance(attribute)]
    return kind(attribute)


class _Read(stages.Executable):
    """What XLA compiled, with the analyses that JAX makes of it."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    def xla_extension_executable(self) -> Any:
        return self._executable

    def cost_analysis(self) -> Any:
        """As that of jax.stages.Compiled: None where a compiler has none, as that of GPUs."""
        try:
            return super().cost_analysis()
        except NotImplementedError:
            return None


def _has_gspmd_shardings(module: Any) -> bool:
    """Returns whether an ir.Module's shardings are GSPMD's alone, and none is Shardy's."""
    text = module.operation.get_asm(large_elements_limit=8)
    return "mhlo.sharding" in text and "sdy." not in text


def compile_stablehlo(
    module: Any,
    devices: Sequence[Any],
    free_results: Sequence[bool],
    compiler_options: Mapping[str, str],
) -> Any:
    """Compiles an ir.Module for `devices`, one a partition, to be read: nothing is loaded.

    `free_results` tells of each result whether the compiler may choose its sharding, and
    `compiler_options` are XLA's by name. Returns what hlo_module.read and compiled_report.read
    take. Raises JaxRuntimeError if it is refused.
    """
    grid = np.array(devices, dtype=object).reshape(1, -1)
    options = compiler.get_compile_options(
        1, grid.size, device_assignment=grid, env_options_overrides=dict(compiler_options)
    )
    build_options = options.executable_build_options
    build_options.allow_spmd_sharding_propagation_to_output = list(free_results)
    # Shardy aborts the process if it meets GSPMD's shardings, which other programs' HLO has.
    if _has_gspmd_shardings(module):
        build_options.use_shardy_partitioner = False

    device_list = xla_client.DeviceList(tuple(devices))
    client = devices[0].client
    return _Read(compiler.backend_compile_and_load(client, module, device_list, options, []))
