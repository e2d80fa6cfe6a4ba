"""Executable: a Program compiled ahead of time for devices, called with trees of arrays."""

import dataclasses
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import compiled_report, hlo_module
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import jax_private, padded, specs
from lingvo_gshard.spmd.padded import PaddedArray
from lingvo_gshard.spmd.program import Program

# The CPU devices of one process share a thread pool, and at each collective every device of a
# program waits in it for the others. Two at once can deadlock.
ONE_AT_A_TIME = threading.Lock()


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One array of an argument: what it must be, and how it lies on the devices."""

    spec: TensorSpec
    sharding: jax.sharding.NamedSharding

    @functools.cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape on the devices; another one than the spec's if they do not divide that."""
        return padded.padded_shape(self.sharding, self.spec.shape)

    def check(self, what: str, array: Any) -> None:
        """Raises ValueError, prefixed by `what`, unless `array` is as expected.

        It is either the whole, or what the devices of this process hold of it.
        """
        whole_shape = self.spec.shape
        shape = getattr(array, "shape", None)
        if shape == whole_shape and array.dtype == self.spec.dtype:
            return

        # Along each dim, this process's devices hold some of the parts, unless these are uneven.
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
        raise ValueError(f"{what}: {given} given, {expected} expected.")

    def place(self, array: Any, is_donated: bool) -> jax.Array:
        """Returns a checked array on its devices, padded; one that lies there already is kept."""
        # The program overwrites a donated array's memory: it must not be the caller's own.
        may_alias = False if is_donated else None

        if self.padded_shape != self.spec.shape:
            array = self._padded(array)

        if isinstance(array, jax.Array) and array.shape == self.padded_shape:
            # Equality is quick to find, and holds for a state that the last call returned.
            if array.sharding == self.sharding:
                return array
            if array.sharding.is_equivalent_to(self.sharding, array.ndim):
                return array
            if array.sharding.num_devices > 1:
                with ONE_AT_A_TIME:  # Moving between shardings is a program with collectives.
                    moved = jax.device_put(array, self.sharding, may_alias=may_alias)
                    return jax.block_until_ready(moved)

        elif not self.sharding.is_fully_addressable:
            # device_put would first compare the arrays of all processes.
            own = np.array(array) if is_donated else np.asarray(array)
            return jax.make_array_from_process_local_data(self.sharding, own, self.padded_shape)

        return jax.device_put(array, self.sharding, may_alias=may_alias)

    def _padded(self, array: Any) -> jax.Array | np.ndarray:
        """Returns an array of the spec's shape with its padding, which it may have already."""
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
        """Checks the leaves of `tree` and returns them on their devices; ValueError with `what`."""
        arrays = dict(tree.FlattenItems())
        if list(arrays) != list(self.leaves):
            missing = sorted(self.leaves.keys() - arrays.keys())[:3] or "nothing"
            unexpected = sorted(arrays.keys() - self.leaves.keys())[:3] or "nothing"
            raise ValueError(f"{what}: missing {missing}, unexpected {unexpected}.")

        # All are checked before any of them takes memory.
        for path, array in arrays.items():
            self.leaves[path].check(f"{what}.{path}", array)
        return [self.leaves[path].place(array, self.is_donated) for path, array in arrays.items()]


class Executable:
    """A compiled program. Call it with one tree of arrays per argument of the Program."""

    def __init__(self, program: Program, mesh: jax.sharding.Mesh, compiled: Any = None) -> None:
        """Compiles for the devices of `mesh`, unless the program's jax.stages.Compiled is given."""
        self.program = program
        self.mesh = mesh
        self.compiled: Any = compiled or lower(program, mesh).compile()

        self._arguments: dict[str, _Argument] = {}
        for name, tree in zip(program.arg_names, program.args, strict=True):
            leaves = {}
            for path, spec in tree.FlattenItems():
                leaves[path] = _Leaf(spec, specs.sharding(program.partitioning, spec, mesh))
            self._arguments[name] = _Argument(name in program.donate, leaves)

        # The logical shapes of the results that come padded, by their place among all.
        self._padded_results: dict[int, tuple[int, ...]] = {}
        for i, spec in enumerate(program.results.Flatten()):
            layout = specs.sharding(program.partitioning, spec, mesh)
            if padded.padded_shape(layout, spec.shape) != spec.shape:
                self._padded_results[i] = spec.shape

        self._shares_threads = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    def __call__(self, *args: NestedMap) -> NestedMap:
        """Runs the program on all devices and returns its results, a NestedMap of JAX arrays.

        A result that the devices do not divide is a PaddedArray, of which np.asarray returns the
        logical values. Takes one NestedMap of numpy, JAX or padded arrays per argument; numpy
        arrays are placed as by `place`, and donated arrays on the devices are deleted. The call
        returns before the results are computed, except on several CPU devices, where it waits.
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

        # Elsewhere JAX returns at once, and the host works on while the devices compute.
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
        divide them. With several processes, a numpy array is either the whole, the same in all of
        them, or this process's share: the part that its devices hold, such as its rows of a batch.
        Its shape decides; it is the whole if the devices do not divide it. All processes must call
        it. Raises ValueError as a call, or for an unknown name.
        """
        if name not in self._arguments:
            raise ValueError(
                f"{self.program.name}: no argument {name!r}, only {', '.join(self._arguments)}."
            )
        leaves = self._arguments[name].leaves.values()
        placed = zip(self._placed(name, tree), leaves, strict=True)
        return tree.Pack(padded.of_shape(array, leaf.spec.shape) for array, leaf in placed)

    def report(self) -> compiled_report.CompiledReport:
        """Returns the compiled program's collectives, memory and operations."""
        return compiled_report.read(self.program.name, self.compiled, self.module)

    @functools.cached_property
    def module(self) -> hlo_module.Module:
        """Returns the compiled program of one partition; reading it needs TensorFlow."""
        return hlo_module.read(self.compiled)

    def _placed(self, name: str, tree: NestedMap) -> list[jax.Array]:
        return self._arguments[name].place(f"{self.program.name}: argument {name}", tree)


def compile_program(program: Program, devices: Sequence[Any] | None = None) -> Executable:
    """Compiles `program` for the first of `devices`, which are jax.devices() by default.

    Raises ValueError for too few devices, a dtype they lack, or an export that this JAX cannot
    read.
    """
    mesh = specs.device_mesh(program.partitioning, devices, f"program {program.name}")
    return Executable(program, mesh)


def lower(program: Program, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """Lowers `program` for the devices of `mesh`, which is quick. Raises as compile_program."""
    leaves = specs.named_leaves(program.arg_names, program.args)
    platform = mesh.devices.flat[0].platform
    specs.check_dtypes(f"{program.name}: argument", leaves, platform)
    specs.check_dtypes(f"{program.name}: result", program.results.FlattenItems(), platform)

    # JAX counts flat arguments: all leaves of a donated tree.
    donated = []
    for i, (path, _) in enumerate(leaves):
        argument_name, _, _ = path.partition(".")
        if argument_name in program.donate:
            donated.append(i)

    jitted = jax.jit(
        _deserialize(program).call,
        out_shardings=specs.shardings(program.partitioning, program.results, mesh).Flatten(),
        donate_argnums=tuple(donated),
        keep_unused=True,  # Otherwise the compiled program would take fewer arguments.
    )
    with jax_private.loading_lapack_if_called(program.exported):
        return jitted.lower(*specs.abstract_arrays(program.partitioning, leaves, mesh))


def _deserialize(program: Program) -> jax_export.Exported:
    """Returns JAX's export; ValueError if this JAX cannot read it."""
    # An export's shardings are written in the dialect of one partitioner.
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        raise ValueError(
            f"program {program.name}: an exported program needs JAX's Shardy partitioner, which "
            "is off; set JAX_USE_SHARDY_PARTITIONER=1, which is the default."
        )

    # JAX reads exports of the six months before it.
    try:
        return jax_export.deserialize(bytearray(program.exported))
    except (ValueError, struct.error) as error:
        raise ValueError(
            f"program {program.name}: JAX {jax.__version__} cannot read its export; another "
            f"version made it, or it is damaged ({error})."
        ) from error
