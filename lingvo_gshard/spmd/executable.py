"""Executable: a Program compiled ahead of time for devices, called with trees of arrays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import export as jax_export

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import compiled_report, specs

if TYPE_CHECKING:
    from lingvo_gshard.spmd.program import Program

# CPU devices of one process share a thread pool in which every device of a program waits for the
# others at each collective. A second program in flight takes threads that the first one waits for,
# and both stop for ever: there, one runs at a time.
_ONE_AT_A_TIME = threading.Lock()


class Executable:
    """A compiled program. Call it with one tree of arrays per argument of the Program."""

    def __init__(self, program: Program, mesh: jax.sharding.Mesh) -> None:
        """Compiles `program` for the devices of `mesh`; use Program.compile."""
        self.program = program
        self._mesh = mesh
        self._leaves = specs.named_leaves(program.arg_names, program.args)
        self._ins = [specs.sharding(program.partitioning, spec, mesh) for _, spec in self._leaves]
        self._donated = [name.split(".", 1)[0] in program.donate for name, _ in self._leaves]
        self._sizes = [len(arg.Flatten()) for arg in program.args]
        self._shares_threads = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        self._compiled = self._compile()

    def __call__(self, *args: NestedMap) -> NestedMap:
        """Runs the program on all devices.

        Args:
          *args: one NestedMap an argument, of numpy or JAX arrays. A numpy array is split over
            the devices by its sharding. Donated JAX arrays are deleted.

        Returns:
          The results, a NestedMap of JAX arrays. It returns before they are computed, except on
          several CPU devices, where it waits.

        Raises:
          ValueError: wrong number of arguments, missing or unexpected paths, or a wrong shape
            or dtype; names the path, what was given and what was expected.
        """
        flat = self.place(*args)
        if not self._shares_threads:
            return self.program.results.Pack(self._compiled(*flat))
        with _ONE_AT_A_TIME:
            results = jax.block_until_ready(self._compiled(*flat))
        return self.program.results.Pack(results)

    def place(self, *args: NestedMap) -> list[jax.Array]:
        """Checks the arguments and puts each leaf on its devices; as for a call."""
        flat = self._flatten(args)
        return [
            _placed(leaf, sharding, donated)
            for leaf, sharding, donated in zip(flat, self._ins, self._donated, strict=True)
        ]

    def place_arg(self, name: str, tree: NestedMap) -> NestedMap:
        """Puts the tree of argument `name` on its devices, so that a later call need not."""
        spec = self._arg(name)
        specs.check_paths(f"{self.program.name}: argument {name}", tree, spec)
        for (path, leaf), expected in zip(tree.FlattenItems(), spec.Flatten(), strict=True):
            specs.check_leaf(f"{self.program.name}: argument {name}.{path}", leaf, expected)
        donated = name in self.program.donate
        shardings = self.shardings(name).Flatten()
        return tree.Pack(
            _placed(leaf, to, donated) for leaf, to in zip(tree.Flatten(), shardings, strict=True)
        )

    def shardings(self, arg_name: str) -> NestedMap:
        """The NamedSharding of every leaf of an argument; ValueError for an unknown name."""
        table = self.program.partitioning
        return self._arg(arg_name).Transform(lambda spec: specs.sharding(table, spec, self._mesh))

    def report(self) -> compiled_report.CompiledReport:
        """What the compiler made of it: collectives, memory, flops."""
        return compiled_report.read(self.program.name, self._compiled)

    def as_text(self) -> str:
        """The compiled program of one partition, as XLA's text."""
        return self._compiled.as_text()

    def _arg(self, name: str) -> NestedMap:
        names = self.program.arg_names
        if name not in names:
            raise ValueError(f"{self.program.name}: no argument {name!r}, only {', '.join(names)}.")
        return self.program.args[names.index(name)]

    def _compile(self) -> Any:
        program = self.program
        exported = jax_export.deserialize(bytearray(program.exported))
        outs = [
            specs.sharding(program.partitioning, spec, self._mesh)
            for spec in program.results.Flatten()
        ]
        jitted = jax.jit(
            exported.call,
            in_shardings=tuple(self._ins),
            out_shardings=outs,
            donate_argnums=tuple(i for i, donated in enumerate(self._donated) if donated),
            keep_unused=True,
        )
        avals = [
            specs.abstract_array(spec, sharding)
            for (_, spec), sharding in zip(self._leaves, self._ins, strict=True)
        ]
        return jitted.lower(*avals).compile()

    def _flatten(self, args: Sequence[NestedMap]) -> list[Any]:
        program = self.program
        if len(args) != len(program.args):
            raise ValueError(
                f"{program.name}: {len(args)} arguments given, {len(program.args)} expected: "
                f"{', '.join(program.arg_names)}."
            )
        flat: list[Any] = []
        for name, given, expected in zip(program.arg_names, args, program.args, strict=True):
            specs.check_paths(f"{program.name}: argument {name}", given, expected)
            flat.extend(given.Flatten())
        for leaf, (name, spec) in zip(flat, self._leaves, strict=True):
            specs.check_leaf(f"{program.name}: argument {name}", leaf, spec)
        return flat


def compile_program(program: Program, devices: Sequence[Any] | None = None) -> Executable:
    """Compiles `program` for `devices`; ValueError as specs.device_mesh."""
    return Executable(program, specs.device_mesh(program.partitioning, devices))


def _placed(leaf: Any, sharding: jax.sharding.NamedSharding, donated: bool) -> jax.Array:
    if isinstance(leaf, jax.Array) and (
        leaf.sharding is sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    ):
        return leaf
    # A donated array's memory is written over: it must not be the caller's own.
    may_alias = False if donated else None
    if not isinstance(leaf, jax.Array) or leaf.sharding.num_devices == 1:
        return jax.device_put(leaf, sharding, may_alias=may_alias)
    with _ONE_AT_A_TIME:  # From one sharding to another is a program with collectives, too.
        return jax.block_until_ready(jax.device_put(leaf, sharding, may_alias=may_alias))
