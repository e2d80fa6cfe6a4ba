"""What has been read of a program so far: its dims, and what it does with them."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from lingvo_gshard.spmd.dims import stablehlo
from lingvo_gshard.spmd.dims.dim_sets import Dim, Dims, DimSets


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
    """Memory that holds a tensor while the program runs, from one operation to another."""

    dims: Dims
    element_bytes: float
    born: int
    dies: int


@dataclasses.dataclass(eq=False, slots=True)
class Tensor:
    """A tensor's dims, and the memory from which it can be had: its own, or what it is made of."""

    dims: Dims
    buffers: frozenset[Buffer]


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


class Notes:
    """Collects what the rules find, while a program is read in the order in which it runs."""

    def __init__(self) -> None:
        self.sets = DimSets()
        self.operations: list[Operation] = []
        self.buffers: list[Buffer] = []
        # Bytes that a call reads and writes, by the dims of the tensors.
        self.traffic: list[tuple[Dims, float]] = []
        # Dims that loops go through one by one.
        self.sequential: set[Dim] = set()
        # What is looked up in, and which of its dims are rows.
        self.tables: list[tuple[Dims, frozenset[int]]] = []
        # Dims that are split by a reshape, and their parts.
        self.wholes: list[tuple[Dim, Dims]] = []
        self.time = 0  # The number of the operation at hand.
        self.times = 1  # How often the operation at hand runs.

    def fresh(self, shape: Sequence[int]) -> Dims:
        """Returns dims that are like no others."""
        return tuple(self.sets.new(size) for size in shape)

    def new(self, value: Any) -> Dims:
        """Returns dims like no others for a value of MLIR."""
        return self.fresh(stablehlo.shape(value))

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns the sizes of a tensor's dims."""
        return tuple(self.sets.sizes[dim] for dim in tensor.dims)

    def unite(self, some: Sequence[Dim], others: Sequence[Dim]) -> None:
        """Makes dims the same, one by one; see DimSets.unite."""
        for a, b in zip(some, others, strict=True):
            self.sets.unite(a, b)

    def record(
        self,
        operation: Any,
        operands: Sequence[Tensor],
        result: Dims,
        flops: float = 0.0,
        whole: Dims = (),
    ) -> None:
        """Records an operation of MLIR with its first operands, and the dims of its result."""
        dims = tuple(tensor.dims for tensor in operands)
        values = (*list(operation.operands)[: len(operands)], operation.results[0])
        element_bytes = tuple(map(stablehlo.element_bytes, values))
        self.operations.append(Operation(dims, result, element_bytes, flops, self.times, whole))

    def stored(self, dims: Dims, element_bytes: float) -> Tensor:
        """Returns a tensor that has memory of its own from now on."""
        buffer = Buffer(dims, element_bytes, self.time, self.time)
        self.buffers.append(buffer)
        return Tensor(dims, frozenset([buffer]))

    def touch(self, tensor: Tensor, time: int | None = None) -> None:
        """Keeps the memory that a tensor is had from, until now or until a time."""
        for buffer in tensor.buffers:
            buffer.dies = self.time if time is None else time

    def count_traffic(self, dims: Dims, element_bytes: float) -> None:
        """Counts the bytes of a tensor that is read or written."""
        size = math.prod(self.sets.sizes[dim] for dim in dims)
        self.traffic.append((dims, size * element_bytes * self.times))


def made_of(tensors: Iterable[Tensor]) -> frozenset[Buffer]:
    """Returns the memory from which a tensor can be had that is computed from others."""
    buffers: set[Buffer] = set()
    for tensor in tensors:
        buffers |= tensor.buffers
    return frozenset(buffers)
