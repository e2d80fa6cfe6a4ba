"""Executable: a Program compiled ahead of time for devices, called with trees of arrays."""

import functools
import struct
from collections.abc import Sequence
from typing import Any

import jax
from jax import export as jax_export

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import compiled_report, hlo_module
from lingvo_gshard.spmd import dtypes, specs
from lingvo_gshard.spmd.argument import ONE_AT_A_TIME, Argument
from lingvo_gshard.spmd.program import Program


class Executable:
    """A compiled program. Call it with one tree of arrays per argument of the Program."""

    def __init__(self, program: Program, mesh: jax.sharding.Mesh) -> None:
        """Compiles `program` for the devices of `mesh`; use compile_program."""
        self.program = program
        self._arguments = {
            name: Argument(
                f"{program.name}: argument {name}",
                spec,
                specs.shardings(program.partitioning, spec, mesh),
                donated=name in program.donate,
            )
            for name, spec in zip(program.arg_names, program.args, strict=True)
        }
        self._shares_threads = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._compiled = _compile(program, mesh)

    def __call__(self, *args: NestedMap) -> NestedMap:
        """Runs the program on all devices.

        Args:
          *args: one NestedMap of numpy or JAX arrays per argument. Numpy arrays are placed as by
            `place`. Donated JAX arrays are deleted.

        Returns:
          The results, a NestedMap of JAX arrays. The call returns before they are computed, except
          on several CPU devices, where it waits.

        Raises:
          ValueError: a wrong number of arguments, missing or unexpected paths, or a wrong shape or
            dtype; the error names the path, the given value and the expected one.
        """
        if len(args) != len(self._arguments):
            raise ValueError(
                f"{self.program.name}: {len(args)} arguments given, {len(self._arguments)} "
                f"expected: {', '.join(self._arguments)}."
            )
        placed = zip(self._arguments.values(), args, strict=True)
        flat = [leaf for argument, tree in placed for leaf in argument.place(tree)]
        if not self._shares_threads:
            return self.program.results.Pack(self._compiled(*flat))
        with ONE_AT_A_TIME:
            results = jax.block_until_ready(self._compiled(*flat))
        return self.program.results.Pack(results)

    def place(self, name: str, tree: NestedMap) -> NestedMap:
        """Checks the tree of argument `name` and puts it on the devices ahead of a call.

        With several processes, a numpy array is either the whole, the same in all of them, or this
        process's share: the part that its devices hold, such as its rows of a batch. Its shape
        decides. All processes must call it.

        Returns:
          A NestedMap of JAX arrays of the whole shapes.

        Raises:
          ValueError: as for a call; or an unknown name.
        """
        return tree.Pack(self._argument(name).place(tree))

    def spec(self, arg_name: str) -> NestedMap:
        """The TensorSpec of every leaf of an argument; ValueError for an unknown name."""
        return self._argument(arg_name).spec

    def shardings(self, arg_name: str) -> NestedMap:
        """The NamedSharding of every leaf of an argument; ValueError for an unknown name."""
        return self._argument(arg_name).shardings

    def report(self) -> compiled_report.CompiledReport:
        """The compiled program's collectives, memory and operations."""
        return compiled_report.read(self.program.name, self._compiled, self.module)

    @functools.cached_property
    def module(self) -> hlo_module.Module:
        """The compiled program of one partition; reading it needs TensorFlow."""
        return hlo_module.read(self._compiled)

    def as_text(self) -> str:
        """XLA's text of the compiled program of one partition."""
        return self._compiled.as_text()

    def _argument(self, name: str) -> Argument:
        if name not in self._arguments:
            raise ValueError(
                f"{self.program.name}: no argument {name!r}, only {', '.join(self._arguments)}."
            )
        return self._arguments[name]


def compile_program(program: Program, devices: Sequence[Any] | None = None) -> Executable:
    """Compiles `program` for the first of `devices`, which are jax.devices() by default.

    Raises:
      ValueError: there are more partitions than devices, they lack a dtype, or this version of JAX
        cannot read the export.
    """
    mesh = specs.device_mesh(program.partitioning, devices, f"program {program.name}")
    return Executable(program, mesh)


def _compile(program: Program, mesh: jax.sharding.Mesh) -> Any:
    leaves = specs.named_leaves(program.arg_names, program.args)
    platform = mesh.devices.flat[0].platform
    dtypes.check(program.name, "argument", leaves, platform)
    dtypes.check(program.name, "result", program.results.FlattenItems(), platform)
    exported = _deserialize(program)
    ins = [specs.sharding(program.partitioning, spec, mesh) for _, spec in leaves]
    jitted = jax.jit(
        exported.call,
        in_shardings=tuple(ins),
        out_shardings=specs.shardings(program.partitioning, program.results, mesh).Flatten(),
        donate_argnums=tuple(
            i for i, (name, _) in enumerate(leaves) if name.split(".", 1)[0] in program.donate
        ),
        keep_unused=True,
    )
    avals = [specs.abstract_array(spec, to) for (_, spec), to in zip(leaves, ins, strict=True)]
    return jitted.lower(*avals).compile()


def _deserialize(program: Program) -> jax_export.Exported:
    """Reads the export; ValueError if JAX can't read or call it."""
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
