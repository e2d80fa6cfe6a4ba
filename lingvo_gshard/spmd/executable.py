"""Executable: a Program compiled ahead of time for devices, called with trees of arrays."""

import dataclasses
import functools
import html
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from lingvo_gshard.core.nested_map import NestedMap, nested
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import padded, specs
from lingvo_gshard.spmd.padded import PaddedArray
from lingvo_gshard.spmd.program import Program
from xla_spmd import checks
from xla_spmd.hlo import compiled_report, hlo_module
from xla_spmd.runtime import jax_private, progress

# The first words of the compiler's errors, and the pattern of the operator names in them.
_REFUSALS = ("INTERNAL", "INVALID_ARGUMENT", "UNIMPLEMENTED")
_OPERATOR = re.compile(r'op_name="([^"]+)"')

# The CPU devices of one process share a thread pool, in which every device waits for the others at
# each collective. Two programs at once can deadlock.
ONE_AT_A_TIME = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One array of an argument: its spec, and its sharding over the devices."""

    spec: TensorSpec
    sharding: jax.sharding.NamedSharding

    @functools.cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape on the devices, which is padded if they do not divide the spec's shape."""
        return padded.padded_shape(self.sharding, self.spec.shape)

    def check(self, what: str, array: Any) -> None:
        """Raises ValueError, prefixed by `what`, unless `array` fits the spec.

        The array is either whole, or the part that this process's devices hold.
        """
        whole_shape = self.spec.shape
        shape = getattr(array, "shape", None)
        if shape == whole_shape and array.dtype == self.spec.dtype:
            return

        # This process's devices hold some of the parts along each dim, unless the parts are uneven.
        own_shape = whole_shape
        if self.padded_shape == whole_shape:
            own_shape = tuple(
                jax_private.num_addressable_indices(self.sharding, dim, whole_shape)
                for dim in range(len(whole_shape))
            )
        if shape == own_shape and array.dtype == self.spec.dtype:
            return

        given = f"a {type(array).__name__}" if shape is None else specs.describe(array)
        expected = specs.describe(self.spec)
        if own_shape != whole_shape:
            expected += f", or {list(own_shape)}, this process's share,"
        hint = ""
        if shape in (whole_shape, own_shape):  # Only the dtype differs.
            hint = f" Cast it: x.astype({self.spec.dtype!r})."
        raise ValueError(f"{what}: {given} given, {expected} expected.{hint}")

    def place(self, array: Any, is_donated: bool) -> jax.Array:
        """Pads a checked array and puts it on its devices, unless it is there already."""
        # The program overwrites a donated array's memory, which must not be the caller's own.
        may_alias = False if is_donated else None

        if self.padded_shape != self.spec.shape:
            array = self._padded(array)

        if isinstance(array, jax.Array) and array.shape == self.padded_shape:
            # Equality is quick to check, and holds for a state that the last call returned.
            if array.sharding == self.sharding:
                return array
            if array.sharding.is_equivalent_to(self.sharding, array.ndim):
                return array
            if array.sharding.num_devices > 1:
                with ONE_AT_A_TIME:  # Resharding runs collectives.
                    moved = jax.device_put(array, self.sharding, may_alias=may_alias)
                    return jax.block_until_ready(moved)

        elif not self.sharding.is_fully_addressable:
            # device_put would first compare the arrays of all processes.
            own = np.array(array) if is_donated else np.asarray(array)
            return jax.make_array_from_process_local_data(self.sharding, own, self.padded_shape)

        return jax.device_put(array, self.sharding, may_alias=may_alias)

    def _padded(self, array: Any) -> jax.Array | np.ndarray:
        """Pads an array of the spec's shape, unless it is padded already."""
        if isinstance(array, PaddedArray) and array.padded.shape == self.padded_shape:
            return array.padded
        padding = padded.end_padding(self.spec.shape, self.padded_shape)
        return np.pad(np.asarray(array), padding)


@dataclasses.dataclass(frozen=True)
class _Argument:
    """An argument of the program, with the leaves of its tree by path, in order."""

    is_donated: bool
    leaves: dict[str, _Leaf]

    def place(self, what: str, tree: NestedMap) -> list[jax.Array]:
        """Checks the leaves of `tree` and puts them on their devices.

        Raises ValueError, prefixed by `what`, if a leaf is missing, unexpected, or does not fit.
        """
        arrays = {}
        for path, value in nested(what, tree).FlattenItems():
            arrays[path] = _as_array(value, self.leaves.get(path))
        if list(arrays) != list(self.leaves):
            missing = sorted(self.leaves.keys() - arrays.keys())[:3] or "nothing"
            unexpected = sorted(arrays.keys() - self.leaves.keys())[:3] or "nothing"
            hint = _list_hint(self.leaves, arrays)
            raise ValueError(f"{what}: missing {missing}, unexpected {unexpected}.{hint}")

        # Check all arrays before any of them takes memory.
        for path, array in arrays.items():
            self.leaves[path].check(f"{what}.{path}", array)
        return [self.leaves[path].place(array, self.is_donated) for path, array in arrays.items()]


def _as_array(value: Any, leaf: _Leaf | None) -> Any:
    """Converts an array of any library, a tensor, or a number to a NumPy or JAX array.

    Tensors of other libraries keep their dtypes. Python's numbers, which lack a dtype, get the
    leaf's dtype, unless it would drop a fraction.
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array | PaddedArray):
        return value
    if hasattr(value, "__array__"):  # For example a tf.Tensor, or a tf.Variable's value.
        return np.asarray(value)
    if not isinstance(value, bool | int | float | complex):
        return value

    array = np.asarray(value)
    if leaf is not None and np.can_cast(array.dtype, leaf.spec.dtype, "same_kind"):
        return array.astype(leaf.spec.dtype)
    return array


def _list_hint(expected: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Returns a hint for a list of numbers given as an array; otherwise ""."""
    for path in sorted(expected.keys() - given.keys()):
        if any(other.startswith(f"{path}[") for other in given):
            return f" A list is a tree, not an array: write numpy.array({path}, dtype)."
    return ""


class Executable:
    """A compiled program. Call it with one tree of arrays per argument of the Program."""

    def __init__(self, program: Program, mesh: jax.sharding.Mesh, compiled: Any = None) -> None:
        """Compiles for the devices of `mesh`, unless the program's jax.stages.Compiled is given.

        Raises ValueError if XLA refuses the program.
        """
        self.program = program
        self.mesh = mesh
        self.compiled: Any = compiled or _compiled(program.name, lower(program, mesh))

        self._arguments: dict[str, _Argument] = {}
        for name, tree in zip(program.arg_names, program.args, strict=True):
            leaves = {}
            for path, spec in tree.FlattenItems():
                leaves[path] = _Leaf(spec, specs.sharding(program.partitioning, spec, mesh))
            self._arguments[name] = _Argument(name in program.donate, leaves)

        # The logical shape of each padded result, by the result's index.
        self._padded_results: dict[int, tuple[int, ...]] = {}
        for i, spec in enumerate(program.results.Flatten()):
            layout = specs.sharding(program.partitioning, spec, mesh)
            if padded.padded_shape(layout, spec.shape) != spec.shape:
                self._padded_results[i] = spec.shape

        self._shares_threads = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def __call__(self, *args: NestedMap) -> NestedMap:
        """Runs the program on all devices and returns its results, a NestedMap of JAX arrays.

        A result that the devices do not divide is a PaddedArray; np.asarray returns its logical
        values. Each argument is a NestedMap or dict of numpy, JAX or padded arrays, tensors or
        numbers. Numpy arrays are placed as by `place`, and donated arrays on the devices are
        deleted. The call returns before the results are computed, except with several CPU devices,
        where it waits.

        Raises ValueError for a wrong number of arguments, missing or unexpected paths, and a wrong
        shape or dtype.
        """
        if len(args) != len(self._arguments):
            raise ValueError(
                f"{self.program.name}: {len(args)} arguments given, {len(self._arguments)} "
                f"expected: {', '.join(self._arguments)}."
            )

        # A program takes and returns flat lists, in the order of its arguments' names and paths.
        leaves: list[jax.Array] = []
        for name, tree in zip(self._arguments, args, strict=True):
            leaves += self._placed(name, tree)

        # On other devices JAX returns at once, and the host continues while the devices compute.
        if self._shares_threads:
            with ONE_AT_A_TIME:
                results = jax.block_until_ready(self.compiled(*leaves))
        else:
            results = self.compiled(*leaves)

        for i, shape in self._padded_results.items():
            results[i] = PaddedArray(results[i], shape)
        return self.program.results.Pack(results)

    def place(self, name: str, tree: NestedMap) -> NestedMap:
        """Checks the tree of argument `name` and puts it on the devices ahead of a call.

        The result holds JAX arrays of the whole shapes, or PaddedArrays where the devices do not
        divide the shapes. With several processes, a numpy array is either the whole array, equal in
        all of them, or the part that this process's devices hold, for example its rows of a batch.
        The shape decides; if the devices do not divide the array, it is the whole. All processes
        must call this. Raises ValueError for an unknown name, missing or unexpected paths, and a
        wrong shape or dtype.
        """
        if name not in self._arguments:
            raise ValueError(
                f"{self.program.name}: no argument {name!r}, only {', '.join(self._arguments)}."
            )
        tree = nested(f"{self.program.name}: argument {name}", tree)
        leaves = self._arguments[name].leaves.values()
        placed = zip(self._placed(name, tree), leaves, strict=True)
        return tree.Pack(padded.of_shape(array, leaf.spec.shape) for array, leaf in placed)

    def report(self) -> compiled_report.CompiledReport:
        """Returns the compiled program's collectives, memory and operations."""
        return compiled_report.read(self.program.name, self.compiled, self.module)

    @property
    def peak_bytes(self) -> int:
        """The most memory in use at once on each device, arguments included.

        The compiler for CPUs counts the arguments alone, so all other parts are added there.
        """
        memory = self.compiled.memory_analysis()
        if self.mesh.devices.flat[0].platform != "cpu":
            return int(memory.peak_memory_in_bytes)
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes + results)

    def __repr__(self) -> str:
        return f"<Executable {self.program.name} on {self.mesh.size} devices>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>\n{self.report()._repr_html_()}"

    @functools.cached_property
    def module(self) -> hlo_module.Module:
        """The compiled program of one partition; reading it needs TensorFlow."""
        return hlo_module.read(self.compiled)

    def _placed(self, name: str, tree: NestedMap) -> list[jax.Array]:
        return self._arguments[name].place(f"{self.program.name}: argument {name}", tree)


def compile_program(program: Program, devices: Sequence[Any] | None = None) -> Executable:
    """Compiles `program` for the first of `devices`, which default to jax.devices().

    Raises ValueError for too few devices, a dtype that they lack, an export that this JAX cannot
    read, or a program that XLA refuses (the message names the operators).
    """
    checks.check_type("compile_program", program, Program, "the Program that `export` returns")
    mesh = specs.device_mesh(program.partitioning, devices, f"program {program.name}")
    return Executable(program, mesh)


def lower(program: Program, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """Lowers `program` for the devices of `mesh`, which is quick.

    Raises ValueError for a dtype that the devices lack, and an export that this JAX cannot read.
    """
    leaves = specs.named_leaves(program.arg_names, program.args)
    platform = mesh.devices.flat[0].platform
    specs.check_dtypes(f"{program.name}: argument", leaves, platform)
    specs.check_dtypes(f"{program.name}: result", program.results.FlattenItems(), platform)

    # JAX counts flat arguments, so a donated tree is all of its leaves.
    prefixes = tuple(f"{name}." for name in program.donate)
    donated = [i for i, (path, _) in enumerate(leaves) if path.startswith(prefixes)]

    jitted = jax.jit(
        _deserialize(program).call,
        out_shardings=specs.shardings(program.partitioning, program.results, mesh).Flatten(),
        donate_argnums=donated,
        keep_unused=True,  # Otherwise the compiled program would take fewer arguments.
    )
    with jax_private.loading_lapack_if_called(program.exported):
        return jitted.lower(*specs.abstract_arrays(program.partitioning, leaves, mesh))


def _compiled(name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a lowered program.

    Raises ValueError, naming the operators, if XLA refuses it.
    """
    try:
        with progress.shown(f"compiling {name}"):
            return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if not message.startswith(_REFUSALS):  # For example, a lost device.
            raise
        reason, *_ = message.splitlines()
        operators = {path.rpartition("PartitionedCall/")[2] for path in _OPERATOR.findall(message)}
        concerned = f" It concerns {', '.join(sorted(operators))}." if operators else ""
        raise ValueError(f"program {name}: XLA cannot compile it: {reason}.{concerned}") from error


def _deserialize(program: Program) -> jax_export.Exported:
    """Returns JAX's export.

    Raises ValueError if this JAX cannot read it, or if Shardy is off.
    """
    # A Program's annotations are Shardy's, which GSPMD cannot read.
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        raise ValueError(
            f"program {program.name}: an exported program needs JAX's Shardy partitioner, which "
            "is off; set JAX_USE_SHARDY_PARTITIONER=1, which is the default."
        )

    return jax_private.deserialized(f"program {program.name}", program.exported)
