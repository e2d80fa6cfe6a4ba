"""Functions that JAX lacks in public: reading, changing and compiling modules.

jax_names.py lists the private names. MLIR's names are public, in jax.extend.
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
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import export as jax_export

from xla_spmd.late import LateModule
from xla_spmd.runtime import jax_names

if TYPE_CHECKING:
    from jax.extend import mlir
    from jax.extend.mlir import ir, passmanager
    from jax.extend.mlir.dialects import sdy, stablehlo
else:  # A run with compiled programs never loads them.
    mlir = LateModule("jax.extend.mlir")
    ir = LateModule("jax.extend.mlir.ir")
    passmanager = LateModule("jax.extend.mlir.passmanager")
    sdy = LateModule("jax.extend.mlir.dialects.sdy")
    stablehlo = LateModule("jax.extend.mlir.dialects.stablehlo")

_FRONTEND = "mhlo.frontend_attributes"
__all__ = ["ir", "passmanager", "sdy"]


def num_addressable_indices(sharding: Any, dim: int, shape: Sequence[int]) -> int:
    """Returns how many indices along `dim` this process's devices hold, for an array of `shape`."""
    count = jax_names.get("jax._src.sharding_impls.num_addressable_indices")
    indices: int = count(sharding, dim, tuple(shape))
    return indices


# JAX calls this function before it lowers a call of an export.
_INITIALIZER = "jax._src.export._export._ensure_backends_initialized"
_lapack_is_left_out = threading.Lock()


@contextlib.contextmanager
def loading_lapack_if_called(exported: bytes) -> Iterator[None]:
    """Lets JAX lower a call of this export, in this context, without LAPACK if it does not need it.

    For any export, JAX loads LAPACK and with it SciPy, which takes 0.2 s at the start.
    """
    # The bytecode contains the names of custom calls literally, for example lapack_sgeqrf_ffi. With
    # a JAX without that function, the start takes the 0.2 s.
    if b"lapack_" in exported or not jax_names.has(_INITIALIZER):
        yield
        return

    # Another thread's export may need it.
    with _lapack_is_left_out, jax_names.replaced(_INITIALIZER, lambda platforms: None):
        yield


# The first bytes of MLIR's bytecode. The producer's name follows.
_BYTECODE = b"ML\xefR"
_PORTABLE = re.compile(rb"ML\xefR.StableHLO_v(\d+\.\d+\.\d+)\0", re.DOTALL)


def stablehlo_module(source: bytes) -> Any:
    """Parses StableHLO into an ir.Module, from a portable artifact, MLIR's bytecode, or its text.

    Raises ValueError, with the parser's reason, if this JAX cannot read it.
    """
    make_context = jax_names.get("jax._src.interpreters.mlir.make_ir_context")
    with make_context() as context, ir.Location.unknown(context):
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
    """Parses a portable artifact into an ir.Module.

    Raises ValueError if this JAX cannot read it.
    """
    newest: str = stablehlo.get_current_version()
    version = _PORTABLE.match(source)
    assert version is not None  # is_portable has found it.
    its_version = version[1].decode()
    if _numbers(its_version) > _numbers(newest):
        raise ValueError(f"it is of StableHLO {its_version}, expected {newest} or older")

    # The parser writes its reasons to standard error's file descriptor.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as reasons:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(reasons.fileno(), 2)
        try:
            return mlir.deserialize_portable_artifact(source)
        except (ValueError, RuntimeError) as error:
            reasons.seek(0)
            raise ValueError(_reason(reasons.read())) from error
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def bytecode(module: Any) -> bytes:
    """Returns an ir.Module as MLIR's bytecode with its locations; stablehlo_module reads it."""
    written = io.BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


def deserialized(what: str, exported: bytes) -> jax_export.Exported:
    """Deserializes JAX's export.

    Raises ValueError, prefixed by `what`, if this JAX cannot read it.
    """
    # JAX reads exports of the preceding six months.
    try:
        return jax_export.deserialize(bytearray(exported))
    except (ValueError, struct.error) as error:
        raise ValueError(
            f"{what}: JAX {jax.__version__} cannot read its export; another version made it, or it "
            f"is damaged ({error})."
        ) from error


def with_module(exported: jax_export.Exported, module: Any) -> jax_export.Exported:
    """Returns an export whose program is a different ir.Module with the same arguments and results.

    Raises ValueError if MLIR's verifier refuses the module.
    """
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise ValueError(_reason(str(error))) from error
    with module.context, ir.Location.unknown(module.context):
        serialized = jax_names.get("jax._src.export._export._module_to_bytecode")(module)
    return dataclasses.replace(exported, mlir_module_serialized=serialized)


def _import_shardings(module: Any) -> None:
    """Rewrites Shardy's shardings, which HLO stores as text, to Shardy's own attributes."""
    attributes = module.operation.attributes
    if _FRONTEND in attributes and "xla.sdy.meshes" in attributes[_FRONTEND]:
        passes = "builtin.module(xla-sdy-round-trip-import-shardy-attrs)"
        passmanager.PassManager.parse(passes).run(module.operation)


def _remove_copies(module: Any) -> None:
    """Removes HLO's copies, which StableHLO lacks; XLA inserts the copies that a program needs."""
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
    """Returns the line of a parser's message that states the error, without its location."""
    lines = message.strip().splitlines() or ["it is damaged"]
    for line in lines:
        _, is_reason, reason = line.partition("error: ")
        if is_reason:
            return reason.strip(" :")
    return lines[-1].strip()


def is_bytecode(source: bytes) -> bool:
    """Returns whether `source` is MLIR's bytecode; portable artifacts are bytecode, too."""
    return source.startswith(_BYTECODE)


def is_portable(source: bytes) -> bool:
    """Returns whether `source` is a portable artifact, as jax.export and StableHLO write them."""
    return _PORTABLE.match(source) is not None


@dataclasses.dataclass(frozen=True)
class ExportedModule:
    """A program in a jax.export file, with its description."""

    platforms: tuple[str, ...]
    is_for_any_platform: bool
    stablehlo: bytes  # A portable artifact.


def exported_module(source: bytes) -> ExportedModule:
    """Reads a jax.export file, except its pytrees, whose types may belong to any library.

    Raises ValueError, with the reason, if the file is not of this kind or if JAX cannot read its
    version.
    """
    fields_type = jax_names.get("jax._src.export.serialization_generated.Exported")
    check_kinds = jax_names.get("jax._src.export.serialization_generated.DisabledSafetyCheckKind")

    # The bytes carry no signature: the reader takes the bytes of any other file for offsets.
    try:
        fields = fields_type.GetRootAs(source)
        version = fields.CallingConventionVersion()
        platforms = [fields.Platforms(i).decode() for i in range(fields.PlatformsLength())]
        checks = [fields.DisabledChecks(i) for i in range(fields.DisabledChecksLength())]
        kinds = [check.Kind() for check in checks]
        artifact = fields.MlirModuleSerializedAsNumpy()
    except (AttributeError, IndexError, TypeError, ValueError, struct.error) as error:
        raise ValueError("it is not a file of jax.export, or was cut short") from error
    if not isinstance(artifact, np.ndarray) or not is_bytecode(artifact[:4].tobytes()):
        raise ValueError("it is not a file of jax.export, or was cut short")

    first = jax_export.minimum_supported_calling_convention_version
    last = jax_export.maximum_supported_calling_convention_version
    if not first <= version <= last:
        raise ValueError(
            f"it has version {version} of jax.export's calling convention, expected {first} to "
            f"{last}"
        )
    is_for_any_platform = check_kinds.platform in kinds
    return ExportedModule(tuple(platforms), is_for_any_platform, artifact.tobytes())


def hlo_from_text(text: bytes) -> bytes:
    """Parses HLO's text into a serialized HloModuleProto.

    Raises ValueError, with the parser's reason, if this JAX cannot read it.
    """
    parse = jax_names.get("jax._src.lib.xla_client.hlo.hlo_module_from_text")
    try:
        module = parse(text.decode())
    except (UnicodeDecodeError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(_reason(str(error))) from error
    serialized: bytes = module.as_serialized_hlo_module_proto()
    return serialized


def hlo_to_stablehlo(serialized: bytes) -> bytes:
    """Converts a serialized HloModuleProto to StableHLO.

    Raises ValueError, with the reason, if StableHLO cannot express it.
    """
    try:
        converted = mlir.hlo_to_stablehlo(serialized)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(_reason(str(error))) from error
    return converted.encode() if isinstance(converted, str) else bytes(converted)


def through_hlo(module: Any) -> Any:
    """Returns an ir.Module converted to HLO and back, without what the conversion folds.

    Shardy's constraints and manual computations are custom calls in it.
    """
    to_hlo = jax_names.get("jax._src.lib._jax.mlir.mlir_module_to_xla_computation")
    computation = to_hlo(bytecode(module))
    read = stablehlo_module(hlo_to_stablehlo(computation.as_serialized_hlo_module_proto()))
    with read.context, ir.Location.unknown():
        _spread_tuples(read)
    return read


def _spread_tuples(module: Any) -> None:
    """Gives custom calls several results in place of HLO's tuple, which Shardy does not read."""
    elements: dict[Any, list[Any]] = {}

    def collect(operation: Any) -> Any:
        if operation.name == "stablehlo.get_tuple_element":
            elements.setdefault(operation.operands[0].owner, []).append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for call, its_elements in elements.items():
        # The other attributes describe the tuple.
        kept = [name for name in ("call_target_name", _FRONTEND) if name in call.attributes]
        types = ir.TupleType(call.results[0].type)
        spread = ir.Operation.create(
            "stablehlo.custom_call",
            results=[types.get_type(i) for i in range(types.num_types)],
            operands=list(call.operands),
            attributes={name: call.attributes[name] for name in kept},
            loc=call.location,
            ip=ir.InsertionPoint(call),
        )
        for element in its_elements:
            index = ir.IntegerAttr(element.attributes["index"]).value
            element.results[0].replace_all_uses_with(spread.results[index])
            element.operation.erase()
        call.erase()


def donate(module: Any, numbers: Collection[int]) -> None:
    """Lets results of an ir.Module's main function reuse the memory of some of its arguments.

    HLO keeps these argument numbers, but hlo_to_stablehlo drops them.
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


def dimension_numbers(attribute: Any) -> Any:
    """Returns the dimension numbers of a StableHLO operation, of the type for its kind."""
    kinds = (
        stablehlo.DotDimensionNumbers,
        stablehlo.ConvDimensionNumbers,
        stablehlo.GatherDimensionNumbers,
        stablehlo.ScatterDimensionNumbers,
    )
    (kind,) = [kind for kind in kinds if kind.isinstance(attribute)]
    return kind(attribute)


class _Read:
    """A program that XLA compiled, with the analyses of a jax.stages.Compiled."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    def runtime_executable(self) -> Any:
        return self._executable

    def memory_analysis(self) -> Any:
        return self._executable.get_compiled_memory_stats()

    def cost_analysis(self) -> Any:
        """Returns XLA's count of the work; None if a compiler, such as the GPU's, lacks it."""
        try:
            return self._executable.cost_analysis()
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("UNIMPLEMENTED"):
                raise
            return None


def has_gspmd_shardings(module: Any) -> bool:
    """Returns whether all shardings of an ir.Module are GSPMD's rather than Shardy's."""
    text = module.operation.get_asm(large_elements_limit=8)
    return "mhlo.sharding" in text and "sdy." not in text


def compile_stablehlo(
    module: Any,
    devices: Sequence[Any],
    free_results: Sequence[bool],
    compiler_options: Mapping[str, str],
    is_shardys: bool = True,
) -> Any:
    """Compiles an ir.Module for `devices`, one per partition, without loading the result.

    `free_results` states for each result whether the compiler may choose its sharding,
    `compiler_options` are XLA's options by name, and `is_shardys` states whether the annotations
    are Shardy's rather than GSPMD's. Returns an executable for hlo_module.read and
    compiled_report.read. Raises JaxRuntimeError if XLA refuses the module.
    """
    # One replica with as many partitions as devices.
    grid = np.array(devices, dtype=object).reshape(1, -1)
    options = _compile_options(grid, compiler_options)
    build_options = options.executable_build_options
    build_options.allow_spmd_sharding_propagation_to_output = list(free_results)
    # Shardy aborts the process if it finds GSPMD's shardings.
    if not is_shardys:
        build_options.use_shardy_partitioner = False

    return _compile(module, devices, options)


def compile_replicas(module: Any, devices: Sequence[Any]) -> Any:
    """Compiles an ir.Module that is one device's program, for `devices`, one per replica.

    XLA's partitioner does not run. Returns an executable, as compile_stablehlo does. Raises
    JaxRuntimeError if XLA refuses the module.
    """
    grid = np.array(devices, dtype=object).reshape(-1, 1)
    return _compile(module, devices, _compile_options(grid, {}))


def _compile_options(grid: Any, compiler_options: Mapping[str, str]) -> Any:
    """Returns the options for a grid of devices [replicas, partitions]."""
    make = jax_names.get("jax._src.compiler.get_compile_options")
    return make(*grid.shape, device_assignment=grid, env_options_overrides=dict(compiler_options))


def _compile(module: Any, devices: Sequence[Any], options: Any) -> Any:
    compile_module = jax_names.get("jax._src.compiler.backend_compile_and_load")
    device_list = jax_names.get("jax._src.lib.xla_client.DeviceList")

    # JAX logs the module's name, which StableHLO's text may omit.
    if "sym_name" not in module.operation.attributes:
        with module.context:
            module.operation.attributes["sym_name"] = ir.StringAttr.get("main")

    client = devices[0].client
    return _Read(compile_module(client, module, device_list(tuple(devices)), options, []))
