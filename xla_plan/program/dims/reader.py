"""Finds the dims of a program that are the same: reads its StableHLO, operation by operation.

Two dims are the same if they meet: in the contraction or the batch of a product, in an elementwise
operation, in the carry of a loop, or in a call. A partitioning that splits one of them wants to
split the other alike, so that they have one letter, as if the program had been written with
einsums:

    dot_general(x [16,12,32], wi [32,64])      x: B L M    wi: M H
    add(x [16,12,32], dot_general(h, wo))      wo: H M

The result of `read` is also enough to estimate the cost of a partitioning: it has the products with
their dims, and the time that each buffer is held. rules.py handles the operations, and this file
the containers of operations: functions, loops and branches.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xla_plan.program.dims import rules
from xla_plan.program.dims.dim_sets import Dim, Dims, DimSets
from xla_plan.program.dims.notes import Buffer, Notes, Operation, Tensor, made_of
from xla_plan.program.stablehlo_program import StablehloProgram
from xla_spmd import stablehlo

# Operations that a compiler fuses with the operations around them, so that their operands need not
# come from memory. Elementwise operations are fused, too.
_FUSED = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.reduce", "stablehlo.slice")
# Operations that need their operands, or keep their results, in memory.
_IN_MEMORY = frozenset(
    f"stablehlo.{name}"
    for name in (
        "dot_general convolution while case if return custom_call gather scatter sort concatenate "
        "dynamic_slice dynamic_update_slice optimization_barrier reduce_window select_and_scatter "
        "rng_bit_generator fft cholesky triangular_solve"
    ).split()
)
_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")
# Operations whose results are existing tensors, in the memory of these tensors.
_PASSED_ON = (
    "func.call",
    "stablehlo.while",
    "stablehlo.composite",
    "stablehlo.optimization_barrier",
    "stablehlo.dynamic_update_slice",  # It writes into its operand.
)
_MOST_SMALL = 2**10  # Tensors of fewer elements are ignored.
# Shard maps: their bodies are written for the devices of one mesh.
_MANUAL = (stablehlo.FULL_TO_SHARD, stablehlo.SHARD_TO_FULL)


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """The dims of a program: of its arguments, its results and its operations."""

    sets: DimSets
    arguments: tuple[Dims, ...]
    results: tuple[Dims, ...]
    constraints: tuple[Dims, ...]  # The program's own constraints, in stablehlo.walk's order.
    operations: tuple[Operation, ...]
    buffers: tuple[Buffer, ...]
    traffic: tuple[tuple[Dims, float], ...]  # Bytes that a call reads and writes, by their dims.
    sequential: frozenset[Dim]  # Dims over which loops iterate.
    # The dims of lookup tables, and the positions of the dims that are rows.
    tables: tuple[tuple[Dims, frozenset[int]], ...]
    heads: dict[Dim, Dim]  # For a dim that a reshape splits, the part that varies slowest.


def read(program: StablehloProgram, letters: Sequence[Sequence[str | None]] = ()) -> Reading:
    """Returns the dims of a program.

    Args:
      program: a program whose arguments are tensors.
      letters: the given letters of each argument's dims, None for an unnamed dim; empty without
        any. Dims with different letters are never united.

    Raises ValueError if the program has a shard map.
    """
    return _Reader(program).read(letters)


class _Reader:
    """Reads a program once, in the order in which it runs, with its calls in their places."""

    def __init__(self, program: StablehloProgram) -> None:
        self._program = program
        self._functions: dict[str, Any] = {}
        for operation in program.module.body.operations:
            if operation.operation.name == "func.func":
                self._functions[operation.operation.attributes["sym_name"].value] = operation

        self._notes = Notes()
        # The tensors by MLIR's values. A function that is called again overwrites its own.
        self._tensors: dict[Any, Tensor] = {}
        self._constraints: dict[Any, Dims] = {}
        self._rules: dict[str, Callable[[Any, list[Tensor]], list[Tensor]]] = {
            "stablehlo.while": self._while,
            "stablehlo.case": self._case,
            "stablehlo.if": self._case,
            "stablehlo.custom_call": self._custom_call,
            "stablehlo.optimization_barrier": lambda operation, operands: operands,
            "stablehlo.composite": self._call,
            "func.call": self._call,
            "sdy.sharding_constraint": self._constraint,
            "sdy.reshard": self._constraint,
            "sdy.manual_computation": self._shard_map,
        }

    def read(self, letters: Sequence[Sequence[str | None]]) -> Reading:
        notes = self._notes
        block = self._functions["main"].regions[0].blocks[0]
        arguments = self._arguments(block, letters)
        results = self._block(block, arguments)
        for tensor in results:
            notes.touch(tensor)
        self._keep_until_the_end(arguments)
        _unite_parts(notes)

        return Reading(
            sets=notes.sets,
            arguments=tuple(tensor.dims for tensor in arguments),
            results=tuple(tensor.dims for tensor in results),
            constraints=tuple(self._constraint_dims()),
            operations=tuple(notes.operations),
            buffers=tuple(notes.buffers),
            traffic=tuple(notes.traffic),
            sequential=frozenset(map(notes.sets.find, notes.sequential)),
            tables=tuple(notes.tables),
            heads={notes.sets.find(whole): parts[0] for whole, parts in notes.wholes},
        )

    def _arguments(self, block: Any, letters: Sequence[Sequence[str | None]]) -> list[Tensor]:
        """Returns the arguments; their dims with the same letter are the same."""
        notes = self._notes
        arguments = []
        for index, value in enumerate(block.arguments):
            tensor = notes.stored(notes.new(value), stablehlo.element_bytes(value))
            for dim, letter in zip(tensor.dims, letters[index] if letters else (), strict=False):
                if letter is not None:
                    notes.sets.name(dim, letter)
            arguments.append(tensor)

        named: dict[str, Dim] = {}
        for tensor in arguments:
            for dim in tensor.dims:
                letter = notes.sets.letter(dim)
                if letter is not None:
                    notes.sets.unite(named.setdefault(letter, dim), dim)
        return arguments

    def _constraint_dims(self) -> Iterable[Dims]:
        for operation in stablehlo.walk(self._program.module.body):
            if stablehlo.is_constraint(operation):
                # A function that nothing calls has not been read.
                value = operation.results[0]
                yield self._constraints.get(value) or self._notes.new(value)

    def _keep_until_the_end(self, arguments: Sequence[Tensor]) -> None:
        """Keeps the memory that the caller holds: all arguments except the donated ones."""
        for argument, tensor in zip(self._program.arguments, arguments, strict=True):
            if not argument.is_donated:
                self._notes.touch(tensor, self._notes.time + 1)

    # --- Blocks and their operations ---

    def _block(self, block: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Reads a block with the given inputs, and returns the tensors that it returns."""
        for value, tensor in zip(block.arguments, inputs, strict=True):
            self._tensors[value] = tensor

        for operation in block.operations:
            self._notes.time += 1
            operands = [self._tensors[value] for value in operation.operands]
            for tensor in operands:
                self._notes.touch(tensor)
            if operation.operation.name in ("func.return", "stablehlo.return"):
                return operands

            results = self._results(operation, operands)
            for value, tensor in zip(operation.results, results, strict=True):
                self._tensors[value] = self._kept(operation, value, tensor)
        return []

    def _results(self, operation: Any, operands: list[Tensor]) -> list[Tensor]:
        name = operation.operation.name
        if name in self._rules:
            return self._rules[name](operation, operands)
        rule = rules.RULES.get(name, rules.elementwise)
        return rule(self._notes, operation, operands)

    def _kept(self, operation: Any, value: Any, tensor: Tensor) -> Tensor:
        """Returns a result with its own memory, if it needs memory."""
        name = operation.operation.name
        if name in _PASSED_ON or stablehlo.is_constraint(operation):
            return tensor

        has_rule = name in self._rules or name in rules.RULES
        is_elementwise = not has_rule and name not in _IN_MEMORY
        is_fused = is_elementwise or name in _FUSED
        is_small = math.prod(stablehlo.shape(value)) < _MOST_SMALL
        if is_fused and (is_small or not _is_needed_in_memory(value)):
            return tensor

        # The traffic of products is counted with their flops.
        element_bytes = stablehlo.element_bytes(value)
        if name not in _PRODUCTS:
            for buffer in tensor.buffers:
                self._notes.count_traffic(buffer.dims, buffer.element_bytes)
            self._notes.count_traffic(tensor.dims, element_bytes)
        return self._notes.stored(tensor.dims, element_bytes)

    def _while(self, operation: Any, operands: list[Tensor]) -> list[Tensor]:
        condition, body = (region.blocks[0] for region in operation.operation.regions)
        self._block(condition, operands)
        times = self._notes.times
        self._notes.times *= stablehlo.num_trips(condition)
        results = self._block(body, operands)
        self._notes.times = times

        # A loop writes into its inputs.
        for tensor, result in zip(operands, results, strict=True):
            self._notes.unite(tensor.dims, result.dims)
            self._notes.touch(tensor)
        return operands

    def _case(self, operation: Any, operands: list[Tensor]) -> list[Tensor]:
        branches = [self._block(region.blocks[0], ()) for region in operation.operation.regions]
        for branch in branches[1:]:
            for tensor, other in zip(branches[0], branch, strict=True):
                self._notes.unite(tensor.dims, other.dims)
        return branches[0]

    def _call(self, operation: Any, operands: list[Tensor]) -> list[Tensor]:
        attributes = operation.operation.attributes
        callee = attributes["callee" if "callee" in attributes else "decomposition"].value
        return self._block(self._functions[callee].regions[0].blocks[0], operands)

    def _custom_call(self, operation: Any, operands: list[Tensor]) -> list[Tensor]:
        if stablehlo.calls(operation, *_MANUAL):
            return self._shard_map(operation, operands)
        if stablehlo.is_constraint(operation):
            return self._constraint(operation, operands)
        buffers = made_of(operands)
        return [Tensor(self._notes.new(value), buffers) for value in operation.results]

    def _constraint(self, operation: Any, operands: list[Tensor]) -> list[Tensor]:
        self._constraints[operation.results[0]] = operands[0].dims
        return operands

    def _shard_map(self, operation: Any, operands: list[Tensor]) -> list[Tensor]:
        raise ValueError(
            f"program {self._program.name}: it has a shard map, whose body is written for the "
            "mesh that it has; a search can only change programs that XLA partitions."
        )


def _is_needed_in_memory(value: Any) -> bool:
    """Returns whether an operation reads a value from memory, or the program returns it."""
    for use in value.uses:
        name = use.owner.operation.name
        is_result = name == "func.return" and _is_of_main(use.owner)
        if name in _IN_MEMORY or is_result:
            return True
    return False


def _is_of_main(returning: Any) -> bool:
    parent = returning.operation.parent
    return "sym_name" in parent.attributes and parent.attributes["sym_name"].value == "main"


def _unite_parts(notes: Notes) -> None:
    """Unites dims with the same parts, and parts of the same dims, until nothing changes.

    A projection to heads [M, 32] is split into [8, 4], and merged again before the product with
    another weight [32, M].
    """
    sets = notes.sets
    before = -1
    while before != sets.count():
        before = sets.count()
        wholes: dict[Dims, Dim] = {}
        by_whole: dict[tuple[Dim, tuple[int, ...]], Dims] = {}
        for whole, parts in notes.wholes:
            key = tuple(map(sets.find, parts))
            sets.unite(wholes.setdefault(key, whole), whole)
            sizes = tuple(sets.sizes[part] for part in parts)
            alike = by_whole.setdefault((sets.find(whole), sizes), parts)
            notes.unite(alike, parts)
