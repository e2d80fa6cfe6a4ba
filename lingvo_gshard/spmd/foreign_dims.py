"""Which dims of a foreign program are the same: read from its StableHLO, operation by operation.

Two dims are the same if they meet: in the contraction or the batch of a product, in an elementwise
operation, in the carry of a loop, or in a call. A partitioning that splits one of them wants to
split the other alike, so that they have one letter, as if the program had been written with
einsums:

    dot_general(x [16,12,32], wi [32,64])      x: B L M    wi: M H
    add(x [16,12,32], dot_general(h, wo))      wo: H M

What `read` returns is also enough to estimate what a partitioning costs: the products with their
dims, and how long each buffer is held.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lingvo_gshard.spmd import jax_private
from lingvo_gshard.spmd.foreign import ForeignProgram

Dim = int  # A number of DimSets.
Dims = tuple[Dim, ...]

_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>?]+|complex<\w+>)>")

# What a compiler computes together with the operations around it, so that its operands need not
# come from memory. All elementwise operations are, too.
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
# Shard maps: their bodies are written for the devices of one mesh.
_MANUAL = ("SPMDFullToShardShape", "SPMDShardToFullShape")
_CONSTRAINTS = ("sdy.sharding_constraint", "sdy.reshard")
_SHARDING = "Sharding"  # The custom call that GSPMD's constraints are.


class DimSets:
    """Disjoint sets of dims; the dims of one set have one size, and one letter if it has any."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._parents: list[Dim] = []
        self._letters: dict[Dim, str] = {}

    def new(self, size: int) -> Dim:
        """Returns a dim that is like no other."""
        self.sizes.append(size)
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def find(self, dim: Dim) -> Dim:
        """Returns the one dim that stands for all of its set."""
        while self._parents[dim] != dim:
            self._parents[dim] = self._parents[self._parents[dim]]
            dim = self._parents[dim]
        return dim

    def letter(self, dim: Dim) -> str | None:
        """Returns the letter that a user has given to a dim of the set, if any."""
        return self._letters.get(self.find(dim))

    def name(self, dim: Dim, letter: str) -> None:
        """Gives a letter to a dim that is alone in its set."""
        self._letters[self.find(dim)] = letter

    def unite(self, a: Dim, b: Dim) -> None:
        """Makes two dims the same, unless their sizes or their letters differ."""
        a = self.find(a)
        b = self.find(b)
        if a == b or self.sizes[a] != self.sizes[b]:
            return

        # Letters that a user gave are kept apart where the program lets them meet.
        kept = self._letters.get(a)
        other = self._letters.get(b)
        if kept is not None and other is not None and kept != other:
            return
        self._parents[b] = a
        if kept is None and other is not None:
            self._letters[a] = other


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
    """Memory that holds a tensor while the program runs, from one operation to another."""

    dims: Dims
    element_bytes: float
    born: int
    dies: int


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that may communicate if its dims are split.

    A dim of an operand that the result lacks is summed, or is looked up in.
    """

    operands: tuple[Dims, ...]
    result: Dims
    element_bytes: tuple[float, ...]  # Of the operands, and then of the result.
    flops: float  # Of one run, on one device that has everything.
    times: int  # How often a call of the program runs it.
    whole: Dims = ()  # The dims along which it reads other elements than it writes.


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """The dims of a program: of its arguments and results, and of what it does with them."""

    sets: DimSets
    arguments: tuple[Dims, ...]
    results: tuple[Dims, ...]
    constraints: tuple[Dims, ...]  # Of the program's own constraints, in the order of `walk`.
    operations: tuple[Operation, ...]
    buffers: tuple[Buffer, ...]
    traffic: tuple[tuple[Dims, float], ...]  # Bytes that a call reads and writes, by their dims.
    sequential: frozenset[Dim]  # Dims that loops go through one by one.
    tables: tuple[
        tuple[Dims, frozenset[int]], ...
    ]  # What is looked up in, and which dims are rows.
    heads: dict[Dim, Dim]  # Of a dim that a reshape splits, its part that varies slowest.


@dataclasses.dataclass(eq=False, slots=True)
class _Tensor:
    """A tensor's dims, and the memory from which it can be had: its own, or what it is made of."""

    dims: Dims
    buffers: frozenset[Buffer]


def is_constraint(operation: Any) -> bool:
    """Returns whether an operation of MLIR only says how its operand is split."""
    name = operation.operation.name
    if name == "stablehlo.custom_call":
        return _target(operation) == _SHARDING
    return name in _CONSTRAINTS


def walk(block: Any) -> Iterable[Any]:
    """Yields all operations of a block of MLIR and of the regions in them, in order."""
    for operation in block.operations:
        yield operation
        for region in operation.operation.regions:
            for inner in region.blocks:
                yield from walk(inner)


def read(program: ForeignProgram, letters: Sequence[Sequence[str | None]] = ()) -> Reading:
    """Returns the dims of a program.

    Args:
      program: any whose arguments are tensors.
      letters: of each argument the letters of its dims that are given, None for a dim without;
        dims of two letters are never made the same. Without it no argument has any.

    Raises ValueError if the program has a shard map.
    """
    return _Reader(program).read(letters)


def _target(operation: Any) -> str:
    return str(operation.operation.attributes["call_target_name"].value)


@functools.cache
def _type(text: str) -> tuple[tuple[int, ...], float]:
    """Returns the shape and the bytes of an element of MLIR's text, `tensor<3x64xbf16>`."""
    tensor = _TENSOR.fullmatch(text)
    if tensor is None:
        return (), 0.0  # A token, or the seed of a generator.
    sizes, dtype = tensor.groups()
    bits = re.search(r"\d+", dtype)
    element_bits = max(8, int(bits[0])) if bits else 8
    if dtype.startswith("complex"):
        element_bits *= 2
    return tuple(int(size) for size in sizes.split("x")[:-1]), element_bits / 8


class _Reader:
    """Reads a program once, in the order in which it runs, with its calls in their places."""

    def __init__(self, program: ForeignProgram) -> None:
        self._program = program
        self._functions: dict[str, Any] = {}
        for operation in program.module.body.operations:
            if operation.operation.name == "func.func":
                self._functions[operation.operation.attributes["sym_name"].value] = operation

        self._sets = DimSets()
        self._tensors: dict[
            Any, _Tensor
        ] = {}  # A function that is called again overwrites its own.
        self._constraints: dict[Any, Dims] = {}
        self._operations: list[Operation] = []
        self._buffers: list[Buffer] = []
        self._traffic: list[tuple[Dims, float]] = []
        self._sequential: set[Dim] = set()
        self._tables: list[tuple[Dims, frozenset[int]]] = []
        self._wholes: list[
            tuple[Dim, Dims]
        ] = []  # Dims that are split by a reshape, and their parts.
        self._time = 0
        self._times = 1  # How often the operations at hand run.
        self._rules: dict[str, Callable[[Any, list[_Tensor]], list[_Tensor]]] = {
            "stablehlo.dot_general": self._dot_general,
            "stablehlo.convolution": self._convolution,
            "stablehlo.transpose": self._transpose,
            "stablehlo.broadcast_in_dim": self._broadcast_in_dim,
            "stablehlo.reshape": self._reshape,
            "stablehlo.reduce": self._reduce,
            "stablehlo.slice": self._same_sizes,
            "stablehlo.pad": self._same_sizes,
            "stablehlo.reduce_window": self._same_sizes,
            "stablehlo.concatenate": self._concatenate,
            "stablehlo.dynamic_slice": self._dynamic_slice,
            "stablehlo.dynamic_update_slice": self._dynamic_update_slice,
            "stablehlo.gather": self._gather,
            "stablehlo.scatter": self._scatter,
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
        main = self._functions["main"]
        block = main.regions[0].blocks[0]
        arguments = []
        for index, value in enumerate(block.arguments):
            tensor = self._stored(self._new(value), _type(str(value.type))[1])
            for dim, letter in zip(tensor.dims, letters[index] if letters else (), strict=False):
                if letter is not None:
                    self._sets.name(dim, letter)
            arguments.append(tensor)

        # Dims that have one letter are the same from the first.
        named: dict[str, Dim] = {}
        for tensor in arguments:
            for dim in tensor.dims:
                letter = self._sets.letter(dim)
                if letter is not None:
                    self._sets.unite(named.setdefault(letter, dim), dim)

        results = self._block(block, arguments)
        for tensor in results:
            self._touch(tensor)
        self._free(arguments)
        self._unite_parts()
        return Reading(
            sets=self._sets,
            arguments=tuple(tensor.dims for tensor in arguments),
            results=tuple(tensor.dims for tensor in results),
            constraints=tuple(self._constraint_dims()),
            operations=tuple(self._operations),
            buffers=tuple(self._buffers),
            traffic=tuple(self._traffic),
            sequential=frozenset(map(self._sets.find, self._sequential)),
            tables=tuple(self._tables),
            heads={self._sets.find(whole): parts[0] for whole, parts in self._wholes},
        )

    def _constraint_dims(self) -> Iterable[Dims]:
        for operation in walk(self._program.module.body):
            if is_constraint(operation):
                # A function that nothing calls has not been read.
                shape, _ = _type(str(operation.results[0].type))
                yield self._constraints.get(operation.results[0]) or self._fresh(shape)

    def _free(self, arguments: Sequence[_Tensor]) -> None:
        """Keeps what the caller holds until the end, which is all but donated arguments."""
        for argument, tensor in zip(self._program.arguments, arguments, strict=True):
            if not argument.is_donated:
                self._touch(tensor, self._time + 1)

    def _unite_parts(self) -> None:
        """Makes dims the same whose parts are the same, and parts whose wholes are, until all are.

        A projection to heads [M, 32] is split into [8, 4], and merged again before the product with
        another weight [32, M].
        """
        before = -1
        while before != self._num_sets():
            before = self._num_sets()
            wholes: dict[Dims, Dim] = {}
            by_whole: dict[tuple[Dim, tuple[int, ...]], Dims] = {}
            for whole, parts in self._wholes:
                key = tuple(map(self._sets.find, parts))
                self._sets.unite(wholes.setdefault(key, whole), whole)
                sizes = tuple(self._sets.sizes[part] for part in parts)
                alike = by_whole.setdefault((self._sets.find(whole), sizes), parts)
                self._unite(alike, parts)

    def _num_sets(self) -> int:
        roots = {self._sets.find(dim) for dim in range(len(self._sets.sizes))}
        return len(roots)

    # --- Blocks and what they hold ---

    def _block(self, block: Any, inputs: Sequence[_Tensor]) -> list[_Tensor]:
        """Reads a block with what it is given; returns what it returns."""
        for value, tensor in zip(block.arguments, inputs, strict=True):
            self._tensors[value] = tensor

        for operation in block.operations:
            self._time += 1
            operands = [self._tensors[value] for value in operation.operands]
            for tensor in operands:
                self._touch(tensor)
            name = operation.operation.name
            if name in ("func.return", "stablehlo.return"):
                return operands

            rule = self._rules.get(name, self._elementwise)
            results = rule(operation, operands)
            for value, tensor in zip(operation.results, results, strict=True):
                self._tensors[value] = self._kept(operation, value, tensor)
        return []

    def _kept(self, operation: Any, value: Any, tensor: _Tensor) -> _Tensor:
        """Returns a result with memory of its own, if it needs any."""
        name = operation.operation.name
        is_elementwise = name not in self._rules and name not in _IN_MEMORY
        is_fused = is_elementwise or name in _FUSED
        if name in ("func.call", "stablehlo.while", "stablehlo.composite"):
            return tensor
        if is_constraint(operation) or name == "stablehlo.optimization_barrier":
            return tensor
        if name == "stablehlo.dynamic_update_slice":
            return tensor  # It writes into its operand.

        # A small tensor counts for nothing.
        shape, element_bytes = _type(str(value.type))
        if math.prod(shape) < 2**10 and is_fused:
            return tensor
        if is_fused and not self._is_needed_in_memory(value):
            return tensor
        # The traffic of products is counted with their flops.
        if name not in _PRODUCTS:
            for buffer in tensor.buffers:
                self._count(buffer.dims, buffer.element_bytes)
            self._count(tensor.dims, element_bytes)
        return self._stored(tensor.dims, element_bytes)

    def _is_needed_in_memory(self, value: Any) -> bool:
        for use in value.uses:
            name = use.owner.operation.name
            is_main = name == "func.return" and self._is_main(use.owner)
            if name in _IN_MEMORY or is_main:
                return True
        return False

    def _is_main(self, returning: Any) -> bool:
        parent = returning.operation.parent
        return "sym_name" in parent.attributes and parent.attributes["sym_name"].value == "main"

    def _stored(self, dims: Dims, element_bytes: float) -> _Tensor:
        buffer = Buffer(dims, element_bytes, self._time, self._time)
        self._buffers.append(buffer)
        return _Tensor(dims, frozenset([buffer]))

    def _touch(self, tensor: _Tensor, time: int | None = None) -> None:
        for buffer in tensor.buffers:
            buffer.dies = self._time if time is None else time

    def _count(self, dims: Dims, element_bytes: float) -> None:
        size = math.prod(self._sets.sizes[dim] for dim in dims)
        self._traffic.append((dims, size * element_bytes * self._times))

    def _record(
        self,
        operation: Any,
        operands: Sequence[_Tensor],
        result: Dims,
        flops: float = 0.0,
        whole: Dims = (),
    ) -> None:
        dims = tuple(tensor.dims for tensor in operands)
        values = (*list(operation.operands)[: len(operands)], operation.results[0])
        element_bytes = tuple(_type(str(value.type))[1] for value in values)
        self._operations.append(Operation(dims, result, element_bytes, flops, self._times, whole))

    # --- Dims ---

    def _fresh(self, shape: Sequence[int]) -> Dims:
        return tuple(self._sets.new(size) for size in shape)

    def _new(self, value: Any) -> Dims:
        return self._fresh(_type(str(value.type))[0])

    def _shape(self, tensor: _Tensor) -> tuple[int, ...]:
        return tuple(self._sets.sizes[dim] for dim in tensor.dims)

    def _unite(self, some: Sequence[Dim], others: Sequence[Dim]) -> None:
        for a, b in zip(some, others, strict=True):
            self._sets.unite(a, b)

    # --- Rules: the results of each kind of operation ---

    def _elementwise(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        """What has the shape of an operand has its dims; another shape is like no other."""
        results = []
        for value in operation.results:
            shape, _ = _type(str(value.type))
            alike = [tensor for tensor in operands if self._shape(tensor) == shape]
            for tensor in alike[1:]:
                self._unite(alike[0].dims, tensor.dims)
            dims = alike[0].dims if alike else self._fresh(shape)
            results.append(_Tensor(dims, _made_of(operands)))
        return results

    def _dot_general(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        numbers = jax_private.dimension_numbers(
            operation.operation.attributes["dot_dimension_numbers"]
        )
        lhs, rhs = (tensor.dims for tensor in operands)
        batch = list(numbers.lhs_batching_dimensions)
        summed = list(numbers.lhs_contracting_dimensions)
        rhs_batch = list(numbers.rhs_batching_dimensions)
        rhs_summed = list(numbers.rhs_contracting_dimensions)
        self._unite([lhs[i] for i in batch], [rhs[i] for i in rhs_batch])
        self._unite([lhs[i] for i in summed], [rhs[i] for i in rhs_summed])

        lhs_free = [dim for i, dim in enumerate(lhs) if i not in batch + summed]
        rhs_free = [dim for i, dim in enumerate(rhs) if i not in rhs_batch + rhs_summed]
        result = (*(lhs[i] for i in batch), *lhs_free, *rhs_free)
        size = math.prod(self._sets.sizes[dim] for dim in (*result, *(lhs[i] for i in summed)))
        self._record(operation, operands, result, flops=2.0 * size)
        return [_Tensor(result, _made_of(operands))]

    def _convolution(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        """Batch and features are products' dims; images and kernels are like no others."""
        attributes = operation.operation.attributes
        numbers = jax_private.dimension_numbers(attributes["dimension_numbers"])
        images, kernel = (tensor.dims for tensor in operands)
        result = list(self._new(operation.results[0]))
        sizes = [self._sets.sizes[dim] for dim in (*result, *kernel)]
        features = kernel[numbers.kernel_output_feature_dimension]
        if attributes["batch_group_count"].value == 1:
            result[numbers.output_batch_dimension] = images[numbers.input_batch_dimension]
        result[numbers.output_feature_dimension] = features
        if attributes["feature_group_count"].value == 1:
            summed = kernel[numbers.kernel_input_feature_dimension]
            self._sets.unite(images[numbers.input_feature_dimension], summed)

        flops = 2.0 * math.prod(sizes) / self._sets.sizes[features]
        whole = tuple(images[i] for i in numbers.input_spatial_dimensions)
        self._record(operation, operands, tuple(result), flops, whole)
        return [_Tensor(tuple(result), _made_of(operands))]

    def _transpose(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        (tensor,) = operands
        order = operation.operation.attributes["permutation"]
        return [_Tensor(tuple(tensor.dims[i] for i in order), tensor.buffers)]

    def _broadcast_in_dim(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        (tensor,) = operands
        dims = list(self._new(operation.results[0]))
        for dim, place in zip(
            tensor.dims, operation.operation.attributes["broadcast_dimensions"], strict=True
        ):
            if self._sets.sizes[dim] == self._sets.sizes[dims[place]]:
                dims[place] = dim
        return [_Tensor(tuple(dims), tensor.buffers)]

    def _reshape(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        (tensor,) = operands
        dims = self._new(operation.results[0])
        sizes = self._sets.sizes
        before = [dim for dim in tensor.dims if sizes[dim] > 1]
        after = [dim for dim in dims if sizes[dim] > 1]

        # From left to right, the fewest dims on both sides that have as many elements.
        while before and after:
            some = [before.pop(0)]
            others = [after.pop(0)]
            while math.prod(sizes[d] for d in some) != math.prod(sizes[d] for d in others):
                if math.prod(sizes[d] for d in some) < math.prod(sizes[d] for d in others):
                    some.append(before.pop(0))
                else:
                    others.append(after.pop(0))

            if len(some) == len(others) == 1:
                self._sets.unite(some[0], others[0])
            elif len(some) == 1:
                self._wholes.append((some[0], tuple(others)))
            elif len(others) == 1:
                self._wholes.append((others[0], tuple(some)))
        return [_Tensor(dims, tensor.buffers)]

    def _reduce(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        tensors = operands[: len(operands) // 2]
        for tensor in tensors[1:]:
            self._unite(tensors[0].dims, tensor.dims)
        reduced = set(operation.operation.attributes["dimensions"])
        result = tuple(dim for i, dim in enumerate(tensors[0].dims) if i not in reduced)
        self._record(operation, tensors, result)
        return [_Tensor(result, _made_of(tensors)) for _ in operation.results]

    def _same_sizes(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        """Dims that keep their size are the same; the others are read at other places."""
        shape, _ = _type(str(operation.results[0].type))
        result, changed = self._kept_dims(operands[0].dims, shape)
        if changed:
            self._record(operation, operands[:1], result, whole=changed)
        return [_Tensor(result, operands[0].buffers) for _ in operation.results]

    def _kept_dims(self, dims: Dims, shape: Sequence[int]) -> tuple[Dims, Dims]:
        """Returns the dims of another shape, and those that have another size in it."""
        result = []
        changed = []
        for dim, size in zip(dims, shape, strict=True):
            if self._sets.sizes[dim] == size:
                result.append(dim)
            else:
                result.append(self._sets.new(size))
                changed.append(dim)
        return tuple(result), tuple(changed)

    def _concatenate(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        along = operation.operation.attributes["dimension"].value
        result = list(operands[0].dims)
        for tensor in operands[1:]:
            self._unite(result[:along], tensor.dims[:along])
            self._unite(result[along + 1 :], tensor.dims[along + 1 :])
        result[along] = self._new(operation.results[0])[along]
        whole = (result[along], *(tensor.dims[along] for tensor in operands))
        self._record(operation, operands, tuple(result), whole=whole)
        return [_Tensor(tuple(result), _made_of(operands))]

    def _dynamic_slice(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        shape, _ = _type(str(operation.results[0].type))
        result, changed = self._kept_dims(operands[0].dims, shape)
        self._sequential.update(changed)
        return [_Tensor(result, operands[0].buffers)]

    def _dynamic_update_slice(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        tensor = operands[0]
        for dim, update in zip(tensor.dims, operands[1].dims, strict=True):
            if self._sets.sizes[dim] == self._sets.sizes[update]:
                self._sets.unite(dim, update)
            else:
                self._sequential.add(dim)
        return [tensor]

    def _gather(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        attributes = operation.operation.attributes
        numbers = jax_private.dimension_numbers(attributes["dimension_numbers"])
        table, indices = operands
        batch = list(numbers.operand_batching_dims)
        self._unite(
            [table.dims[i] for i in batch],
            [indices.dims[i] for i in numbers.start_indices_batching_dims],
        )

        # Whole rows of the table keep its dims; the others have those of the indices.
        slice_sizes = list(attributes["slice_sizes"])
        in_rows = set(range(len(table.dims))) - {*numbers.collapsed_slice_dims, *batch}
        self._tables.append((table.dims, frozenset(in_rows)))
        rows = []
        for i in sorted(in_rows):
            is_whole = slice_sizes[i] == self._sets.sizes[table.dims[i]]
            rows.append(table.dims[i] if is_whole else self._sets.new(slice_sizes[i]))
        others = [dim for i, dim in enumerate(indices.dims) if i != numbers.index_vector_dim]
        result = []
        for place in range(len(rows) + len(others)):
            result.append(rows.pop(0) if place in numbers.offset_dims else others.pop(0))
        self._record(operation, operands, tuple(result))
        return [_Tensor(tuple(result), _made_of(operands))]

    def _scatter(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        numbers = jax_private.dimension_numbers(
            operation.operation.attributes["scatter_dimension_numbers"]
        )
        count = len(operands) // 2
        tables = operands[:count]
        indices = operands[count]
        batch = list(numbers.input_batching_dims)
        for table, update in zip(tables, operands[count + 1 :], strict=True):
            self._unite(
                [table.dims[i] for i in batch],
                [indices.dims[i] for i in numbers.scatter_indices_batching_dims],
            )
            outside = [*numbers.inserted_window_dims, *batch]
            rows = [dim for i, dim in enumerate(table.dims) if i not in outside]
            others = [dim for i, dim in enumerate(indices.dims) if i != numbers.index_vector_dim]
            for place, dim in enumerate(update.dims):
                is_row = place in numbers.update_window_dims
                self._sets.unite(rows.pop(0) if is_row else others.pop(0), dim)
            self._record(operation, [update, indices], table.dims)
        return [_Tensor(table.dims, _made_of(operands)) for table in tables]

    def _while(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        condition, body = (region.blocks[0] for region in operation.operation.regions)
        self._block(condition, operands)
        times = self._times
        self._times *= _num_trips(condition)
        results = self._block(body, operands)
        self._times = times

        # A loop writes into what it was given.
        for tensor, result in zip(operands, results, strict=True):
            self._unite(tensor.dims, result.dims)
            self._touch(tensor)
        return operands

    def _case(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        branches = [self._block(region.blocks[0], ()) for region in operation.operation.regions]
        for branch in branches[1:]:
            for tensor, other in zip(branches[0], branch, strict=True):
                self._unite(tensor.dims, other.dims)
        return branches[0]

    def _call(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        attributes = operation.operation.attributes
        callee = attributes["callee" if "callee" in attributes else "decomposition"].value
        return self._block(self._functions[callee].regions[0].blocks[0], operands)

    def _custom_call(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        if _target(operation) in _MANUAL:
            return self._shard_map(operation, operands)
        if _target(operation) == _SHARDING:
            return self._constraint(operation, operands)
        made_of = _made_of(operands)
        return [_Tensor(self._new(value), made_of) for value in operation.results]

    def _constraint(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        self._constraints[operation.results[0]] = operands[0].dims
        return operands

    def _shard_map(self, operation: Any, operands: list[_Tensor]) -> list[_Tensor]:
        raise ValueError(
            f"program {self._program.name}: it has a shard map, whose body is written for the "
            "mesh that it has; --search can only change programs that XLA partitions."
        )


def _made_of(tensors: Iterable[_Tensor]) -> frozenset[Buffer]:
    buffers: set[Buffer] = set()
    for tensor in tensors:
        buffers |= tensor.buffers
    return frozenset(buffers)


def _num_trips(condition: Any) -> int:
    """Returns how often a loop runs whose counter begins at 0, as JAX's do; 1 if only data know."""
    constants = {}
    for operation in condition.operations:
        name = operation.operation.name
        if name == "stablehlo.constant" and not _type(str(operation.results[0].type))[0]:
            constants[operation.results[0]] = re.search(
                r"dense<(-?\d+)>", str(operation.operation.attributes["value"])
            )
        elif name == "stablehlo.compare":
            bound = constants.get(operation.operands[1])
            return max(1, int(bound[1])) if bound else 1
    return 1
