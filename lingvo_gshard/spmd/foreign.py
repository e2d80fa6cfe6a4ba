"""Programs that others wrote, in StableHLO: their main functions' arguments, and compilation.

A Program (program.py) is this project's own and has TensorSpecs with letters. Of a foreign program
only the module is known. It has enough: each argument's name, type, sharding and donation.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import math
import pathlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from google.protobuf.message import DecodeError

from lingvo_gshard.files import storage
from lingvo_gshard.hlo import compiled_report, hlo_module, hlo_proto, source_lines
from lingvo_gshard.hlo.hlo_module import Array
from lingvo_gshard.spmd import jax_private

_FORMATS = (
    "a file of jax.export, StableHLO (text or bytecode) or HLO (text or a serialized "
    "HloModuleProto)"
)
# A program has no weights in it; and a protobuf or a flatbuffer is no larger.
_MAX_BYTES = 2**31

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

# HLO's pairs of a result and the argument that it replaces.
_ALIASED = re.compile(r"parameter_number = (\d+)")


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
        """The compiled program of one partition; ValueError if it cannot be read."""
        try:
            return hlo_module.read(self.compiled)
        except jax.errors.JaxRuntimeError as error:
            # Names that are not UTF-8 come into the compiler, but not out of it.
            reason = str(error).splitlines()[0]
            raise ValueError(f"program {self.program.name}: it is damaged: {reason}") from error

    def source_lines(self) -> Mapping[str, str]:
        """Returns the user's file and line by op_name, where JAX and the compiler kept it."""
        (module,) = self.compiled.runtime_executable().hlo_modules()
        return source_lines.read(module.as_serialized_hlo_module_proto())

    def report(self) -> compiled_report.CompiledReport:
        """Returns the compiled program's collectives, memory and operations."""
        return compiled_report.read(self.program.name, self.compiled, self.module)


def compile_program(
    program: ForeignProgram,
    devices: Sequence[Any],
    compiler_options: Mapping[str, str] = types.MappingProxyType({}),
) -> ForeignExecutable:
    """Compiles a foreign program for as many devices as it has partitions, in their order.

    `compiler_options` are XLA's by name. Raises jax.errors.JaxRuntimeError if the compiler refuses
    the program or an option.
    """
    compiled = jax_private.compile_stablehlo(
        program.module, devices, program.free_results, compiler_options
    )
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

    Raises ValueError if there is no such file, it is too large or none of the known formats, of a
    version that this JAX cannot read, exported for other platforms, or compiled already.
    """
    what = f"--program={path}"
    _check_file(what, path)
    source = path.read_bytes()

    with _formats_in_errors(what):
        hlo = _hlo_module(source)
    if hlo is not None:
        # What is compiled has an order of its instructions.
        if hlo.schedule.sequences:
            raise ValueError(f"{what}: this HLO is compiled already; give what it was made from.")
        with _formats_in_errors(what):
            source = jax_private.hlo_to_stablehlo(hlo.SerializeToString())

    elif not jax_private.is_bytecode(source) and not _is_mlir(source):
        with _formats_in_errors(what):
            exported = _exported_module(source)
        # Programs without operations of a platform's own may say that they are for any.
        if exported.platforms != (platform,) and not exported.is_for_any_platform:
            raise ValueError(
                f"{what}: exported for {', '.join(exported.platforms)}, expected {platform} alone; "
                f"give jax.export.export platforms=[{platform!r}]."
            )
        source = exported.stablehlo

    with _formats_in_errors(what):
        module = jax_private.stablehlo_module(source)
    if hlo is not None:
        donors = [donor.parameter_number for donor in hlo.buffer_donor.entries]
        jax_private.donate(module, donors)
    return of_module(path.name, module)


@contextlib.contextmanager
def _formats_in_errors(what: str) -> Iterator[None]:
    """Raises ValueError, prefixed by `what`, with the formats that are read."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}; JAX {jax.__version__} reads {_FORMATS}.") from error


def digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a program's file; ValueError if it can be none."""
    _check_file(f"--program={path}", path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_file(what: str, path: pathlib.Path) -> None:
    """Raises ValueError, prefixed by `what`, if a file can be no program, before it is read."""
    if path.is_dir():
        raise ValueError(f"{what}: this is a folder, expected a file.")
    if not path.is_file():
        raise ValueError(f"{what}: there is no such file.")

    size_bytes = storage.size_bytes(path)
    if size_bytes == 0:
        raise ValueError(f"{what}: the file is empty.")
    if size_bytes > _MAX_BYTES:
        raise ValueError(
            f"{what}: {size_bytes / 2**30:.1f} GiB are too large for a program, at most "
            f"{_MAX_BYTES / 2**30:.0f} GiB are read; weights should be arguments, not constants."
        )


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

    # MLIR leaves out the list of the attributes where no argument has any.
    argument_attributes = _attributes(main, "arg_attrs", len(main.arguments))
    aliased = _aliased(module)
    arguments = []
    for index, value in enumerate(main.arguments):
        argument = _argument(name, index, value, argument_attributes[index], axes)
        is_donated = argument.is_donated or index in aliased
        arguments.append(dataclasses.replace(argument, is_donated=is_donated))
    arguments = _with_names_of_their_own(arguments)
    results = _attributes(main, "res_attrs", len(main.type.results))
    return ForeignProgram(
        name=name,
        module=module,
        num_partitions=_num_partitions(module, axes, argument_attributes),
        axes=axes,
        arguments=tuple(arguments),
        free_results=tuple(_sharding(result) is None for result in results),
    )


def _is_mlir(source: bytes) -> bool:
    """Whether a file begins as MLIR's text does, with a module, an alias or a comment."""
    return (
        re.match(rb"\s*(module\b|func\.func\b|#\w+ = |//|\"builtin\.module\")", source) is not None
    )


def _hlo_module(source: bytes) -> Any | None:
    """Returns the HloModuleProto of HLO's text, or in a file or an HloProto; None if it is none.

    Raises ValueError as jax_private.hlo_from_text.
    """
    if source.lstrip().startswith(b"HloModule"):
        source = jax_private.hlo_from_text(source)

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


def _exported_module(source: bytes) -> jax_private.ExportedModule:
    """Returns what a file of jax.export has; ValueError if it is none."""
    # The formats in bytes have zeros.
    if b"\0" not in source:
        raise ValueError("this text is no program")
    return jax_private.exported_module(source)


def _with_names_of_their_own(arguments: Sequence[Argument]) -> list[Argument]:
    """Returns the arguments with their numbers in the names that several have."""
    counts = collections.Counter(argument.name for argument in arguments)
    renamed = []
    for index, argument in enumerate(arguments):
        # TensorFlow calls all of them XLA_Args.
        if counts[argument.name] > 1:
            argument = dataclasses.replace(argument, name=f"{argument.name}[{index}]")
        renamed.append(argument)
    return renamed


def _num_partitions(module: Any, axes: Mapping[str, int], arguments: Sequence[Any]) -> int:
    """Returns for how many devices a module is, by its attribute, its mesh or its shardings."""
    attributes = module.operation.attributes
    if "mhlo.num_partitions" in attributes:
        return int(attributes["mhlo.num_partitions"].value)
    if axes:
        return math.prod(axes.values())

    # HLO keeps no number. A tiled sharding has all devices.
    numbers = [1]
    for argument in arguments:
        tiled = _TILED.search(_sharding(argument) or "")
        if tiled is not None:
            numbers.append(math.prod(int(count) for count in tiled[1].split(",")))
    return max(numbers)


def _aliased(module: Any) -> frozenset[int]:
    """Returns the numbers of the arguments whose memory a module made from HLO gives to results."""
    attributes = module.operation.attributes
    if "mhlo.input_output_alias" not in attributes:
        return frozenset()
    return frozenset(map(int, _ALIASED.findall(str(attributes["mhlo.input_output_alias"]))))


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
