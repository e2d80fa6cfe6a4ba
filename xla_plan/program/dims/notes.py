"""The notes taken while a program is read: its dims, and its operations on them."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xla_plan.program.dims.dim_sets import Dim, Dims, DimSets
from xla_spmd import stablehlo


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
    """Memory that holds a tensor while the program runs, from one operation to another."""

    dims: Dims
    element_bytes: float
    born: int
    dies: int


@dataclasses.dataclass(eq=False, slots=True)
class Tensor:
    """A tensor's dims and the memory that provides it: its own, or the memory of its inputs."""

    dims: Dims
    buffers: frozenset[Buffer]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that may communicate if its dims are split.

    A dim of an operand that the result lacks is summed, or indexed by a lookup.
    """

    operands: tuple[Dims, ...]
    result: Dims
    element_bytes: tuple[float, ...]  # The sizes for the operands, and then the result.
    flops: float  # The flops of one run, without partitioning.
    times: int  # How often a call of the program runs it.
    whole: Dims = ()  # The dims along which it reads and writes different elements.


class Notes:
    """Collects the rules' findings, while a program is read in the order in which it runs."""

    def __init__(self) -> None:
        self.sets = DimSets()
        self.operations: list[Operation] = []
        self.buffers: list[Buffer] = []
        # Bytes that a call reads and writes, by the dims of the tensors.
        self.traffic: list[tuple[Dims, float]] = []
        # Dims over which loops iterate.
        self.sequential: set[Dim] = set()
        # The dims of lookup tables, and the positions of the dims that are rows.
        self.tables: list[tuple[Dims, frozenset[int]]] = []
        # Dims that are split by a reshape, and their parts.
        self.wholes: list[tuple[Dim, Dims]] = []
        self.time = 0  # The number of the current operation.
        self.times = 1  # How often the current operation runs.

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
        """Returns a tensor that has its own memory from now on."""
        buffer = Buffer(dims, element_bytes, self.time, self.time)
        self.buffers.append(buffer)
        return Tensor(dims, frozenset([buffer]))

    def touch(self, tensor: Tensor, time: int | None = None) -> None:
        """Keeps the memory that provides a tensor, until now or until `time`."""
        for buffer in tensor.buffers:
            buffer.dies = self.time if time is None else time

    def count_traffic(self, dims: Dims, element_bytes: float) -> None:
        """Counts the bytes of a tensor that is read or written."""
        size = math.prod(self.sets.sizes[dim] for dim in dims)
        self.traffic.append((dims, size * element_bytes * self.times))


def made_of(tensors: Iterable[Tensor]) -> frozenset[Buffer]:
    """Returns the memory that provides a tensor computed from `tensors`."""
    buffers: set[Buffer] = set()
    for tensor in tensors:
        buffers |= tensor.buffers
    return frozenset(buffers)
