"""Executable: a Program compiled ahead of time for devices, called with trees of arrays."""

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
from lingvo_gshard.spmd import jax_private, specs
from lingvo_gshard.spmd.program import Program

# The CPU devices of one process share a thread pool, and at each collective every device of a
# program waits in it for the others. Two at once can deadlock.
ONE_AT_A_TIME = threading.Lock()


class Executable:
    """A compiled program. Call it with one tree of arrays per argument of the Program."""

    def __init__(self, program: Program, mesh: jax.sharding.Mesh, compiled: Any = None) -> None:
        """Compiles for the devices of `mesh`, unless the program's jax.stages.Compiled is given."""
        self.program, self.mesh = program, mesh
        self._arguments = {
            name: {
                path: (spec, specs.sharding(program.partitioning, spec, mesh))
                for path, spec in tree.FlattenItems()
            }
            for name, tree in zip(program.arg_names, program.args, strict=True)
        }
        self._shares_threads = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self.compiled: Any = compiled or lower(program, mesh).compile()

    def __call__(self, *args: NestedMap) -> NestedMap:
        """Runs the program on all devices and returns its results, a NestedMap of JAX arrays.

        Takes one NestedMap of numpy or JAX arrays per argument; numpy arrays are placed as by
        `place`, and donated JAX arrays are deleted. The call returns before the results are
        computed, except on several CPU devices, where it waits. Raises ValueError for a wrong
        number of arguments, missing or unexpected paths, and a wrong shape or dtype.
        """
        if len(args) != len(self._arguments):
            raise ValueError(
                f"{self.program.name}: {len(args)} arguments given, {len(self._arguments)} "
                f"expected: {', '.join(self._arguments)}."
            )
        placed = map(self._placed, self._arguments, args)
        flat = [leaf for leaves in placed for leaf in leaves]
        if not self._shares_threads:
            return self.program.results.Pack(self.compiled(*flat))
        with ONE_AT_A_TIME:
            results = jax.block_until_ready(self.compiled(*flat))
        return self.program.results.Pack(results)

    def place(self, name: str, tree: NestedMap) -> NestedMap:
        """Checks the tree of argument `name` and puts it on the devices ahead of a call.

        The result holds JAX arrays of the whole shapes. With several processes, a numpy array is
        either the whole, the same in all of them, or this process's share: the part that its
        devices hold, such as its rows of a batch. Its shape decides. All processes must call it.
        Raises ValueError as a call, or for an unknown name.
        """
        if name not in self._arguments:
            raise ValueError(
                f"{self.program.name}: no argument {name!r}, only {', '.join(self._arguments)}."
            )
        return tree.Pack(self._placed(name, tree))

    def report(self) -> compiled_report.CompiledReport:
        """The compiled program's collectives, memory and operations."""
        return compiled_report.read(self.program.name, self.compiled, self.module)

    @functools.cached_property
    def module(self) -> hlo_module.Module:
        """The compiled program of one partition; reading it needs TensorFlow."""
        return hlo_module.read(self.compiled)

    def _placed(self, name: str, tree: NestedMap) -> list[jax.Array]:
        """The leaves of `tree` on their devices; an array that lies there already is kept."""
        what, expected = f"{self.program.name}: argument {name}", self._arguments[name]
        given = dict(tree.FlattenItems())
        if list(given) != list(expected):
            missing = sorted(expected.keys() - given.keys())[:3] or "nothing"
            extra = sorted(given.keys() - expected.keys())[:3] or "nothing"
            raise ValueError(f"{what}: missing {missing}, unexpected {extra}.")
        for path, leaf in given.items():
            _check(f"{what}.{path}", leaf, *expected[path])
        is_donated = name in self.program.donate
        return [_put(leaf, *expected[path], is_donated) for path, leaf in given.items()]


def compile_program(program: Program, devices: Sequence[Any] | None = None) -> Executable:
    """Compiles `program` for the first of `devices`, which are jax.devices() by default.

    ValueError for too few devices, a dtype they lack, or an export that this JAX cannot read.
    """
    mesh = specs.device_mesh(program.partitioning, devices, f"program {program.name}")
    return Executable(program, mesh)


def lower(program: Program, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """Lowers `program` for the devices of `mesh`, which is quick. Raises as compile_program."""
    leaves = specs.named_leaves(program.arg_names, program.args)
    platform = mesh.devices.flat[0].platform
    specs.check_dtypes(f"{program.name}: argument", leaves, platform)
    specs.check_dtypes(f"{program.name}: result", program.results.FlattenItems(), platform)
    exported = _deserialize(program)
    jitted = jax.jit(
        exported.call,
        out_shardings=specs.shardings(program.partitioning, program.results, mesh).Flatten(),
        donate_argnums=tuple(
            i for i, (name, _) in enumerate(leaves) if name.split(".", 1)[0] in program.donate
        ),
        keep_unused=True,
    )
    return jitted.lower(*specs.abstract_arrays(program.partitioning, leaves, mesh))


def _deserialize(program: Program) -> jax_export.Exported:
    if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
        raise ValueError(
            f"program {program.name}: an exported program needs JAX's Shardy partitioner, which "
            "is off; set JAX_USE_SHARDY_PARTITIONER=1, which is the default."
        )
    try:
        return jax_export.deserialize(bytearray(program.exported))
    except (ValueError, struct.error) as error:
        raise ValueError(
            f"program {program.name}: JAX {jax.__version__} cannot read its export; another "
            f"version made it, or it is damaged ({error})."
        ) from error


def _check(what: str, leaf: Any, spec: TensorSpec, sharding: jax.sharding.Sharding) -> None:
    shape = getattr(leaf, "shape", None)
    if shape == spec.shape and leaf.dtype == spec.dtype:
        return
    # The shape of what the devices of this process hold together.
    own = tuple(
        jax_private.num_addressable_indices(sharding, i, spec.shape) for i in range(len(spec.shape))
    )
    if shape == own and leaf.dtype == spec.dtype:
        return
    given = f"a {type(leaf).__name__}" if shape is None else specs.describe(leaf)
    expected = specs.describe(spec)
    if own != spec.shape:
        expected += f", or {list(own)}, this process's share,"
    raise ValueError(f"{what}: {given} given, {expected} expected.")


def _put(
    leaf: Any, spec: TensorSpec, sharding: jax.sharding.NamedSharding, donated: bool
) -> jax.Array:
    # The program overwrites a donated array's memory: it must not be the caller's own.
    may_alias = False if donated else None
    if isinstance(leaf, jax.Array) and leaf.shape == spec.shape:
        if leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if leaf.sharding.num_devices > 1:
            with ONE_AT_A_TIME:  # Moving between shardings is a program with collectives.
                moved = jax.device_put(leaf, sharding, may_alias=may_alias)
                return jax.block_until_ready(moved)
    elif not sharding.is_fully_addressable:
        # device_put would first compare the arrays of all processes.
        own = np.array(leaf) if donated else np.asarray(leaf)
        return jax.make_array_from_process_local_data(sharding, own, spec.shape)
    return jax.device_put(leaf, sharding, may_alias=may_alias)
