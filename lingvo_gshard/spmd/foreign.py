"""Programs that others wrote, in StableHLO: what their main function tells, and their compilation.

A Program (program.py) is this project's own and has TensorSpecs with letters. Of a foreign program
only the module is known. It has enough: each argument's name, type, sharding and donation.
"""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from google.protobuf.message import DecodeError
from jax import export as jax_export

from lingvo_gshard.hlo import compiled_report, hlo_module, hlo_proto, source_lines
from lingvo_gshard.hlo.hlo_module import Array
from lingvo_gshard.spmd import jax_private

_FORMATS = "a file of jax.export, StableHLO (text or bytecode) or a serialized HloModuleProto"

_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>?]+|complex<\w+>)>")
_INTEGER = re.compile(r"(u?)i(\d+)")
# An argument's location: its name, or else a place in a file, which numbers follow.
_NAME = re.compile(r'loc\("((?:[^"\\]|\\.)*)"(?!:\d)')

# Shardy's `#sdy.sharding<@mesh, [{"data", ?}, {"model":(1)2}, {}]>` and `<["data"=2, "model"=4]>`.
_SHARDY_DIMS = re.compile(r"\[((?:\{[^}]*\}p?\d*,? ?)*)\]")
_SHARDY_DIM = re.compile(r"\{([^}]*)\}")
_SHARDY_AXIS = re.compile(r'"([^"]+)"(?::\(\d+\)(\d+))?')
_SHARDY_MESH_AXIS = re.compile(r'"([^"]+)"=(\d+)')
# GSPMD's `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`: a number a dim, and perhaps others.
_TILED = re.compile(r"devices=\[([\d,]+)\]")


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a program's main function."""

    name: str  # As JAX names it, such as `params['w']`.
    array: Array  # Its type as a whole.
    ways: tuple[int, ...]  # The number of parts that each dim is split into.
    has_sharding: bool  # Whether the program says how it is split.
    is_donated: bool

    @property
    def local(self) -> Array:
        """Its type on one device; a dim that is not divisible is padded."""
        pairs = zip(self.array.shape, self.ways, strict=True)
        return Array(self.array.dtype, tuple(-(-size // ways) for size, ways in pairs))


@dataclasses.dataclass(frozen=True, eq=False)
class ForeignProgram:
    """Somebody else's program for all devices, before it is partitioned and compiled."""

    name: str
    module: Any  # Its ir.Module.
    num_partitions: int
    axes: dict[str, int]  # The axes of its mesh with their sizes; empty where it names none.
    arguments: tuple[Argument, ...]
    free_results: tuple[bool, ...]  # Whether the compiler chooses the sharding of each result.


class ForeignExecutable:
    """A compiled foreign program, to be read as an Executable is."""

    def __init__(self, program: ForeignProgram, compiled: Any) -> None:
        self.program = program
        self.compiled = compiled

    @functools.cached_property
    def module(self) -> hlo_module.Module:
        """The compiled program of one partition."""
        return hlo_module.read(self.compiled)

    def source_lines(self) -> Mapping[str, str]:
        """Returns the user's file and line by op_name, where JAX and the compiler kept it."""
        (module,) = self.compiled.runtime_executable().hlo_modules()
        return source_lines.read(module.as_serialized_hlo_module_proto())

    def report(self) -> compiled_report.CompiledReport:
        """Returns the compiled program's collectives, memory and operations."""
        return compiled_report.read(self.program.name, self.compiled, self.module)


def compile_program(program: ForeignProgram, devices: Sequence[Any]) -> ForeignExecutable:
    """Compiles a foreign program for as many devices as it has partitions, in their order.

    Raises jax.errors.JaxRuntimeError if the compiler refuses it.
    """
    compiled = jax_private.compile_stablehlo(program.module, devices, program.free_results)
    return ForeignExecutable(program, compiled)


def of_jitted(jitted: Any, args: Sequence[Any], platform: str) -> ForeignProgram:
    """Returns the program of a jax.jit-ted function, lowered for `platform`, such as `tpu`.

    `args` are arrays or ShapeDtypeStructs with shardings, whose mesh may be a jax AbstractMesh.
    Raises ValueError as `of_module`.
    """
    lowered = jitted.trace(*args).lower(lowering_platforms=(platform,))
    name = getattr(jitted, "__name__", "program")
    return of_module(name, lowered.compiler_ir("stablehlo"))


def read(path: pathlib.Path, platform: str) -> ForeignProgram:
    """Returns the program in a file, which is to be compiled for `platform`.

    Raises ValueError if there is no such file, it is none of the known formats, of a version that
    this JAX cannot read, exported for other platforms, or compiled already.
    """
    if not path.is_file():
        raise ValueError(f"--program={path}: there is no such file.")
    source = path.read_bytes()
    what = f"--program={path}"

    if source.startswith(b"HloModule"):
        raise ValueError(
            f"{what}: this JAX has no parser for HLO's text; write the HloModuleProto, as "
            "--xla_dump_hlo_as_proto does."
        )
    hlo = _hlo_module(source)
    if hlo is not None:
        if hlo.schedule.sequences:
            raise ValueError(f"{what}: this HLO is compiled already; give what it was made from.")
        source = jax_private.hlo_to_stablehlo(hlo.SerializeToString())
    elif not jax_private.is_bytecode(source) and not _is_mlir(source):
        source = _exported_module(what, source, platform)

    try:
        module = jax_private.stablehlo_module(source)
    except ValueError as error:
        raise ValueError(
            f"{what}: JAX {jax.__version__} cannot read it as StableHLO ({error}); expected "
            f"{_FORMATS}."
        ) from error
    return of_module(path.name, module)


def of_module(name: str, module: Any) -> ForeignProgram:
    """Returns the program of an ir.Module of StableHLO with a public function `main`.

    Raises ValueError if it has none, or an argument whose shape is not known.
    """
    axes: dict[str, int] = {}
    main = None
    for operation in module.body.operations:
        if operation.operation.name == "sdy.mesh":
            axes |= {axis: int(size) for axis, size in _SHARDY_MESH_AXIS.findall(str(operation))}
        if operation.operation.name == "func.func":
            if operation.operation.attributes["sym_name"].value == "main":
                main = operation
    if main is None:
        raise ValueError(f"program {name}: it has no function `main`.")

    attributes = module.operation.attributes
    if "mhlo.num_partitions" in attributes:
        num_partitions = int(attributes["mhlo.num_partitions"].value)
    else:
        num_partitions = math.prod(axes.values())

    # MLIR leaves out the list of the attributes where no argument has any.
    argument_attributes = _attributes(main, "arg_attrs", len(main.arguments))
    arguments = []
    for index, value in enumerate(main.arguments):
        arguments.append(_argument(name, index, value, argument_attributes[index], axes))
    results = _attributes(main, "res_attrs", len(main.type.results))
    return ForeignProgram(
        name=name,
        module=module,
        num_partitions=num_partitions,
        axes=axes,
        arguments=tuple(arguments),
        free_results=tuple(_sharding(result) is None for result in results),
    )


def _is_mlir(source: bytes) -> bool:
    """Whether a file begins as MLIR's text does, with a module, an alias or a comment."""
    return (
        re.match(rb"\s*(module\b|func\.func\b|#\w+ = |//|\"builtin\.module\")", source) is not None
    )


def _is_text(source: bytes) -> bool:
    """Whether a file may be text; the formats in bytes have zeros."""
    return b"\0" not in source


def _hlo_module(source: bytes) -> Any | None:
    """Returns the HloModuleProto in a file, or in the HloProto there; None if it is neither."""
    messages = hlo_proto.messages()
    for name in ("xla.HloProto", "xla.HloModuleProto"):
        try:
            proto = messages[name].FromString(source)
        except DecodeError:
            continue
        module = proto.hlo_module if name == "xla.HloProto" else proto
        if module.computations and module.entry_computation_name:
            return module
    return None


def _exported_module(what: str, source: bytes, platform: str) -> bytes:
    """Returns the StableHLO in a file of jax.export; ValueError, prefixed by `what`, as `read`."""
    if _is_text(source):
        raise ValueError(f"{what}: this text is no program; expected {_FORMATS}.")

    # JAX reads the fields of other bytes as if they were its own, so that any error may come up.
    try:
        exported = jax_export.deserialize(bytearray(source))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{what}: JAX {jax.__version__} cannot read it ({reason}); expected {_FORMATS}."
        ) from error

    # Programs without operations of a platform's own may say that they are for any.
    is_for_any = jax_export.DisabledSafetyCheck.platform() in exported.disabled_safety_checks
    if exported.platforms != (platform,) and not is_for_any:
        raise ValueError(
            f"{what}: exported for {', '.join(exported.platforms)}, expected {platform} alone; "
            f"give jax.export.export platforms=[{platform!r}]."
        )
    return exported.mlir_module_serialized


def _attributes(function: Any, name: str, count: int) -> list[Any]:
    """Returns the attributes of each argument or result of a function."""
    if name not in function.operation.attributes:
        return [{}] * count
    return list(function.operation.attributes[name])


def _argument(
    program: str, index: int, value: Any, attributes: Any, axes: dict[str, int]
) -> Argument:
    array = _array(f"program {program}: argument {index}", str(value.type))
    location = _NAME.match(str(value.location))
    sharding = _sharding(attributes)
    return Argument(
        name=location[1] if location else f"argument {index}",
        array=array,
        ways=_ways(sharding or "", len(array.shape), axes),
        has_sharding=sharding is not None,
        is_donated="tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes,
    )


def _sharding(attributes: Any) -> str | None:
    """Returns the text of a sharding in the attributes of an argument or result, if any."""
    for name in ("sdy.sharding", "mhlo.sharding"):
        if name in attributes:
            return str(attributes[name])
    return None


def _ways(sharding: str, rank: int, axes: dict[str, int]) -> tuple[int, ...]:
    """Returns the number of parts of each dim, by a sharding's text; 1 where it says none."""
    tiled = _TILED.search(sharding)
    if tiled is not None:
        return tuple(int(count) for count in tiled[1].split(",")[:rank])

    dims = _SHARDY_DIMS.search(sharding)
    if dims is None:
        return (1,) * rank
    ways = []
    for dim in _SHARDY_DIM.findall(dims[1]):
        # Part of an axis, a sub-axis, has a size of its own.
        sizes = [int(size or axes[axis]) for axis, size in _SHARDY_AXIS.findall(dim)]
        ways.append(math.prod(sizes))
    return tuple(ways)


def _array(what: str, type_: str) -> Array:
    """Returns a tensor's type from MLIR's text, such as `tensor<3x64xbf16>`."""
    tensor = _TENSOR.fullmatch(type_)
    if tensor is None:
        raise ValueError(f"{what}: expected a tensor of known shape, got {type_}.")
    sizes, dtype = tensor.groups()
    shape = tuple(int(size) for size in sizes.split("x")[:-1])

    # MLIR's names of dtypes to XLA's.
    integer = _INTEGER.fullmatch(dtype)
    if dtype == "i1":
        return Array("pred", shape)
    if integer is not None:
        return Array(f"{'u' if integer[1] else 's'}{integer[2]}", shape)
    if dtype.startswith("complex"):
        bits = 2 * int(re.findall(r"\d+", dtype)[0])
        return Array(f"c{bits}", shape)
    return Array(dtype, shape)
