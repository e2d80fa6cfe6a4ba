"""Programs of StableHLO that anybody wrote: their main functions' arguments, and compilation.

The module alone is enough: it has each argument's name, type, sharding and donation.
"""

import collections
import dataclasses
import functools
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xla_spmd.annotations import shardy
from xla_spmd.hlo import compiled_report, hlo_module, source_lines
from xla_spmd.hlo.hlo_module import Array
from xla_spmd.runtime import jax_private

_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>?]+|complex<\w+>)>")
_INTEGER = re.compile(r"(u?)i(\d+)")
# An argument's location: its name, or else a place in a file, which numbers follow.
_NAME = re.compile(r'loc\("((?:[^"\\]|\\.)*)"(?!:\d)')

# Shardy's `#sdy.sharding<@mesh, [{"data", ?}, {"model":(1)2}, {}]>` and `<["data"=2, "model"=4]>`.
_SHARDY_DIMS = re.compile(r"\[((?:\{[^}]*\}p?\d*,? ?)*)\]")
_SHARDY_DIM = re.compile(r"\{([^}]*)\}")
_SHARDY_AXIS = re.compile(r'"([^"]+)"(?::\(\d+\)(\d+))?')
_SHARDY_MESH_AXIS = re.compile(r'"([^"]+)"=(\d+)')
# GSPMD's `{devices=[2,1,4]<=[8] last_tile_dim_replicate}`: a number for each dim, and perhaps
# others.
_TILED = re.compile(r"devices=\[([\d,]+)\]")

# The mesh that a sharding names or contains.
_SHARDY_MESH = re.compile(r"sharding<(?:@(\w+)|@\"([^\"]+)\"|mesh<\[([^\]]*)\])")

# HLO's pairs of a result and the argument that it replaces.
_ALIASED = re.compile(r"parameter_number = (\d+)")


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a program's main function."""

    name: str  # JAX's name of it, such as `params['w']`.
    array: Array  # The type of the whole array.
    ways: tuple[int, ...]  # The number of parts that each dim is split into.
    has_sharding: bool  # Whether the program annotates it.
    is_donated: bool
    is_on_host: bool = False  # Whether it is in the host's memory, such as `pinned_host`.

    @property
    def local(self) -> Array:
        """Its type on one device; a dim that is not divisible is padded."""
        pairs = zip(self.array.shape, self.ways, strict=True)
        return Array(self.array.dtype, tuple(-(-size // ways) for size, ways in pairs))


@dataclasses.dataclass(frozen=True, eq=False)
class StablehloProgram:
    """Somebody else's program for all devices, before it is partitioned and compiled."""

    name: str
    module: Any  # Its ir.Module.
    num_partitions: int
    # The axes of its mesh with their sizes; empty if it does not name axes. Among several meshes,
    # it is the one that splits the most arguments.
    axes: dict[str, int]
    arguments: tuple[Argument, ...]
    free_results: tuple[bool, ...]  # Whether the compiler chooses the sharding of each result.


class StablehloExecutable:
    """A compiled program, to be read as an Executable is."""

    def __init__(self, program: StablehloProgram, compiled: Any, gspmds_reason: str = "") -> None:
        """`gspmds_reason` states why GSPMD propagated the shardings; empty if Shardy did."""
        self.program = program
        self.compiled = compiled
        self.gspmds_reason = gspmds_reason

    @functools.cached_property
    def module(self) -> hlo_module.Module:
        """The compiled program of one partition. Raises ValueError if it cannot be read."""
        try:
            return hlo_module.read(self.compiled)
        except jax.errors.JaxRuntimeError as error:
            # The compiler accepts names that are not UTF-8, but cannot return them.
            reason = str(error).splitlines()[0]
            raise ValueError(f"program {self.program.name}: it is damaged: {reason}") from error

    def source_lines(self) -> Mapping[str, str]:
        """Returns the user's file and line by op_name, if JAX and the compiler kept them."""
        (module,) = self.compiled.runtime_executable().hlo_modules()
        return source_lines.read(module.as_serialized_hlo_module_proto())

    def report(self) -> compiled_report.CompiledReport:
        """Returns the compiled program's collectives, memory and operations."""
        return compiled_report.read(self.program.name, self.compiled, self.module)


def compile_program(
    program: StablehloProgram,
    devices: Sequence[Any],
    compiler_options: Mapping[str, str] = types.MappingProxyType({}),
) -> StablehloExecutable:
    """Compiles a program for one device per partition, in their order.

    GSPMD's annotations are rewritten to Shardy's; if that is not possible, GSPMD propagates them.
    `compiler_options` are XLA's by name. Raises jax.errors.JaxRuntimeError if the compiler refuses
    the program or an option.
    """
    module = program.module
    gspmds_reason = ""
    if jax_private.has_gspmd_shardings(module):
        try:
            module = shardy.of_gspmd(program.name, module, program.num_partitions)
        except ValueError as error:
            gspmds_reason = str(error)

    compiled = jax_private.compile_stablehlo(
        module, devices, program.free_results, compiler_options, is_shardys=not gspmds_reason
    )
    return StablehloExecutable(program, compiled, gspmds_reason)


def of_jitted(jitted: Any, args: Sequence[Any], platform: str) -> StablehloProgram:
    """Returns the program of a jax.jit-ted function, lowered for `platform`, such as `tpu`.

    `args` are arrays or ShapeDtypeStructs with shardings, whose mesh may be a jax AbstractMesh.
    Raises ValueError if the function is not jax.jit's, if the shape of an argument is not known, if
    the program has several replicas, or if its meshes have different numbers of devices.
    """
    name = getattr(jitted, "__name__", "program")
    # A function of jax.pmap can be lowered, but not for another platform.
    if not hasattr(jitted, "trace"):
        raise ValueError(f"program {name}: expected a function of jax.jit.")
    lowered = jitted.trace(*args).lower(lowering_platforms=(platform,))
    return of_module(name, lowered.compiler_ir("stablehlo"))


def of_module(name: str, module: Any) -> StablehloProgram:
    """Returns the program of an ir.Module of StableHLO with a public function `main`.

    Raises ValueError if the module lacks `main`, if the shape of an argument is not known, if there
    are several replicas, or if the meshes have different numbers of devices.
    """
    meshes: dict[str, dict[str, int]] = {}
    main = None
    for operation in module.body.operations:
        if operation.operation.name == "sdy.mesh":
            meshes[operation.operation.attributes["sym_name"].value] = _axes(str(operation))
        if operation.operation.name == "func.func":
            if operation.operation.attributes["sym_name"].value == "main":
                main = operation
    if main is None:
        raise ValueError(f"program {name}: it has no function `main`.")

    replicas = module.operation.attributes
    if "mhlo.num_replicas" in replicas:
        check_replicas(f"program {name}", int(replicas["mhlo.num_replicas"].value))

    # MLIR leaves out the list of attributes if all arguments lack attributes.
    argument_attributes = _attributes(main, "arg_attrs", len(main.arguments))
    axes = _main_axes(name, meshes, argument_attributes)
    aliased = _aliased(module)
    arguments = []
    for index, value in enumerate(main.arguments):
        argument = _argument(name, index, value, argument_attributes[index], meshes)
        is_donated = argument.is_donated or index in aliased
        arguments.append(dataclasses.replace(argument, is_donated=is_donated))
    arguments = _with_names_of_their_own(arguments)
    results = _attributes(main, "res_attrs", len(main.type.results))
    return StablehloProgram(
        name=name,
        module=module,
        num_partitions=_num_partitions(module, axes, argument_attributes),
        axes=axes,
        arguments=tuple(arguments),
        free_results=tuple(_sharding(result) is None for result in results),
    )


def _axes(text: str) -> dict[str, int]:
    """Returns the axes in the text of a mesh."""
    return {axis: int(size) for axis, size in _SHARDY_MESH_AXIS.findall(text)}


def _main_axes(
    program: str, meshes: Mapping[str, dict[str, int]], arguments: Sequence[Any]
) -> dict[str, int]:
    """Returns the axes of the mesh that the most arguments name; the first mesh among equals.

    Raises ValueError if meshes have different numbers of devices.
    """
    # A mesh without axes is a single device, for tensors that are not partitioned.
    partitioned = {name: axes for name, axes in meshes.items() if axes}
    sizes = {math.prod(axes.values()) for axes in partitioned.values()}
    if len(sizes) > 1:
        described = ", ".join(f"{name} {axes}" for name, axes in partitioned.items())
        raise ValueError(
            f"program {program}: its meshes have different numbers of devices ({described}), "
            "expected one number."
        )

    named = collections.Counter(dict.fromkeys(partitioned, 0))
    for argument in arguments:
        mesh = _SHARDY_MESH.search(_sharding(argument) or "")
        if mesh is not None and (mesh[1] or mesh[2]) in partitioned:
            named[mesh[1] or mesh[2]] += 1
    return dict(partitioned[named.most_common(1)[0][0]]) if named else {}


def check_replicas(what: str, replicas: int) -> None:
    """Raises ValueError for a program of several replicas, such as jax.pmap once wrote."""
    if replicas > 1:
        raise ValueError(
            f"{what}: it is for {replicas} replicas, expected 1 and a partition for each device; "
            "write it with jax.jit and shardings, or jax.shard_map, instead of jax.pmap."
        )


def _with_names_of_their_own(arguments: Sequence[Argument]) -> list[Argument]:
    """Returns the arguments; names that several share are made unique by the arguments' numbers."""
    counts = collections.Counter(argument.name for argument in arguments)
    renamed = []
    for index, argument in enumerate(arguments):
        # TensorFlow calls all of them XLA_Args.
        if counts[argument.name] > 1:
            argument = dataclasses.replace(argument, name=f"{argument.name}[{index}]")
        renamed.append(argument)
    return renamed


def _num_partitions(module: Any, axes: Mapping[str, int], arguments: Sequence[Any]) -> int:
    """Returns a module's number of devices, from its attribute, its mesh or its shardings."""
    attributes = module.operation.attributes
    if "mhlo.num_partitions" in attributes:
        return int(attributes["mhlo.num_partitions"].value)
    if axes:
        return math.prod(axes.values())

    # HLO does not store the number. A tiled sharding lists all devices.
    numbers = [1]
    for argument in arguments:
        tiled = _TILED.search(_sharding(argument) or "")
        if tiled is not None:
            numbers.append(math.prod(int(count) for count in tiled[1].split(",")))
    return max(numbers)


def _aliased(module: Any) -> frozenset[int]:
    """Returns the numbers of the arguments whose memory results reuse, in a module from HLO."""
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
    program: str, index: int, value: Any, attributes: Any, meshes: Mapping[str, dict[str, int]]
) -> Argument:
    array = _array(f"program {program}: argument {index}", str(value.type))
    location = _NAME.match(str(value.location))
    sharding = _sharding(attributes)
    return Argument(
        name=location[1] if location else f"argument {index}",
        array=array,
        ways=_ways(sharding or "", len(array.shape), meshes),
        has_sharding=sharding is not None,
        is_donated="tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes,
        is_on_host=_is_on_host(attributes),
    )


def _is_on_host(attributes: Any) -> bool:
    """Returns whether an argument is in the host's memory."""
    if "mhlo.memory_kind" not in attributes:
        return False
    return "host" in str(attributes["mhlo.memory_kind"])


def _sharding(attributes: Any) -> str | None:
    """Returns the text of a sharding in the attributes of an argument or result, if any."""
    for name in ("sdy.sharding", "mhlo.sharding"):
        if name in attributes:
            return str(attributes[name])
    return None


def _ways(sharding: str, rank: int, meshes: Mapping[str, dict[str, int]]) -> tuple[int, ...]:
    """Returns the number of parts of each dim from a sharding's text, 1 for unsplit dims."""
    tiled = _TILED.search(sharding)
    if tiled is not None:
        return tuple(int(count) for count in tiled[1].split(",")[:rank])

    dims = _SHARDY_DIMS.search(sharding)
    if dims is None:
        return (1,) * rank
    mesh = _SHARDY_MESH.search(sharding)
    axes = {}
    if mesh is not None:
        axes = _axes(mesh[3]) if mesh[3] is not None else meshes[mesh[1] or mesh[2]]
    ways = []
    for dim in _SHARDY_DIM.findall(dims[1]):
        # A sub-axis, a part of an axis, has its own size.
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
