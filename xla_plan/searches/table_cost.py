"""The cost of a program under a table of letters: an estimate that needs no compiler.

A table is a row for each letter that is split: (("B", ("data",)), ("H", ("model",))). In a tensor,
rows take the axes in the order of the table, and each axis splits one dim. If an axis splits the
operands and the result of an operation differently, one of them moves:

    x [B:data, M] W [M:data, H]         W is gathered, as fully sharded weights are
    h [B, H:model] W [H:model, M]       the result is summed over `model`
    dW = x [B:data, M] dy [B:data, H]   the sum is scattered if M or H is split by `data`

XLA may choose otherwise. The estimate only ranks tables; the compiler judges the best of them.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from xla_plan.machines import hardware, networks
from xla_plan.machines.hardware import GIB
from xla_plan.program.argument_letters import NONE, Letters
from xla_plan.program.dims.dim_sets import Dims
from xla_spmd.mesh import Mesh

Rows = tuple[tuple[str, tuple[str, ...]], ...]  # A table: letters and their axes.
Split = tuple[tuple[str, ...], ...]

_MOST_MOMENTS = 300  # How many points of the program the memory is computed for.


def split(letters: Sequence[str], rows: Rows) -> Split:
    """Returns the axes that split each dim of a tensor; see the head of the file."""
    axes: list[tuple[str, ...]] = [()] * len(letters)
    taken: set[str] = set()
    for letter, names in rows:
        if letter in letters:
            # If the tensor has a letter twice, its first dim is split.
            axes[letters.index(letter)] = tuple(name for name in names if name not in taken)
            taken.update(names)
    return tuple(axes)


@dataclasses.dataclass(frozen=True)
class _Operation:
    """A kind of operation: operations of a program with the same letters and sizes."""

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    num_bytes: tuple[float, ...]  # The sizes of the operands, and then of the result.
    flops: float
    whole: frozenset[str]


class TableCost:
    """Estimates of a program's call on a topology."""

    def __init__(self, letters: Letters, topology_name: str) -> None:
        self._letters = letters
        self._topology = topology_name
        self._rates = hardware.generation(topology_name)
        self._operations = list(_operations(letters).items())
        self._traffic = collections.defaultdict[tuple[str, ...], float](float)
        for dims, num_bytes in letters.reading.traffic:
            self._traffic[letters.of(dims)] += num_bytes
        self._secs: dict[tuple[object, ...], float] = {}
        self._collectives: dict[tuple[str, Mesh, str], float] = {}

    def secs(self, mesh: Mesh, rows: Rows) -> float:
        """Returns the estimated time of a call."""
        secs = 0.0
        for names, num_bytes in self._traffic.items():
            secs += num_bytes / self._ways(mesh, names, rows) / self._rates.memory_bytes_per_sec
        for index, (operation, times) in enumerate(self._operations):
            # Tables differ in few letters, and an operation has few.
            used = {*sum(operation.operands, ()), *operation.result}
            own = tuple(row for row in rows if row[0] in used)
            key = tuple(mesh.shape.items()), index, own
            if key not in self._secs:
                self._secs[key] = self._operation_secs(operation, mesh, own)
            secs += times * self._secs[key]
        return secs

    def gib(self, mesh: Mesh, rows: Rows) -> float:
        """Returns the most memory that a device holds at once, by the program's written order."""
        kinds, held = self._held
        ways = [self._ways(mesh, names, rows) for names in kinds]
        return float((held @ (1 / np.array(ways))).max()) / GIB

    def argument_gib(self, mesh: Mesh, rows: Rows, num_bytes: Sequence[int]) -> float:
        """Returns the memory of the arguments on a device; `num_bytes` are their whole sizes."""
        total = 0.0
        for names, size in zip(self._letters.arguments, num_bytes, strict=True):
            total += size / self._ways(mesh, names, rows)
        return total / GIB

    @functools.cached_property
    def _held(self) -> tuple[list[tuple[str, ...]], np.ndarray]:
        """The kinds of tensors by letters, and the bytes of each kind held at some moments."""
        reading = self._letters.reading
        kinds: dict[tuple[str, ...], int] = {}
        end = max((buffer.dies for buffer in reading.buffers), default=0) + 1
        deltas = collections.defaultdict[int, np.ndarray](lambda: np.zeros(end + 1))
        for buffer in reading.buffers:
            kind = kinds.setdefault(self._letters.of(buffer.dims), len(kinds))
            size = buffer.element_bytes * math.prod(reading.sets.sizes[dim] for dim in buffer.dims)
            deltas[kind][buffer.born] += size
            deltas[kind][max(buffer.dies, buffer.born + 1)] -= size

        held = np.cumsum([deltas[kind] for kind in range(len(kinds))], axis=1).T
        # The moments with the most bytes before splitting; a table changes their order a little.
        most = np.argsort(-held.sum(axis=1))[:_MOST_MOMENTS]
        return list(kinds), np.unique(held[most], axis=0)

    def _ways(self, mesh: Mesh, names: Sequence[str], rows: Rows) -> int:
        return math.prod(mesh.size(axes) for axes in split(names, rows))

    def _operation_secs(self, operation: _Operation, mesh: Mesh, rows: Rows) -> float:
        """Returns the time of one run: the longer of compute and memory, and the network's."""
        placed = [_letter_by_axis(names, rows) for names in (*operation.operands, operation.result)]
        local = []
        for num_bytes, letters in zip(operation.num_bytes, placed, strict=True):
            local.append(num_bytes / math.prod(mesh.size(axis) for axis in letters))

        compute_secs = operation.flops / self._rates.peak_flops
        network_secs = 0.0
        for axis in mesh.axis_names:
            # An axis splits the operation along the letter that costs least, or not at all.
            options = {letters[axis] for letters in placed[:-1] if axis in letters}
            moved_secs = self._axis_secs(operation, mesh, axis, None, placed, local)
            computed_secs = compute_secs
            for letter in sorted(options - operation.whole):
                secs = self._axis_secs(operation, mesh, axis, letter, placed, local)
                split_secs = compute_secs / mesh.size(axis)
                if secs + split_secs < moved_secs + computed_secs:
                    moved_secs = secs
                    computed_secs = split_secs
            network_secs += moved_secs
            compute_secs = computed_secs

        memory_secs = 0.0
        if operation.flops:
            memory_secs = sum(local) / self._rates.memory_bytes_per_sec
        return max(compute_secs, memory_secs) + network_secs

    def _axis_secs(
        self,
        operation: _Operation,
        mesh: Mesh,
        axis: str,
        letter: str | None,
        placed: Sequence[Mapping[str, str]],
        local: Sequence[float],
    ) -> float:
        """Returns the time to move operands and result if an axis splits a letter, or no letter."""
        ways = mesh.size(axis)
        secs = 0.0
        for names, letters, num_bytes in zip(
            operation.operands, placed[:-1], local[:-1], strict=True
        ):
            now = letters.get(axis)
            if now is None or now == letter:
                continue
            if letter in names:
                secs += num_bytes * self._secs_per_byte("all-to-all", mesh, axis)
            else:
                secs += ways * num_bytes * self._secs_per_byte("all-gather", mesh, axis)

        wanted = placed[-1].get(axis)
        if letter is None or wanted == letter:
            return secs
        if letter in operation.result:
            # The operation would write the result with a different split.
            if wanted is None:
                return secs + local[-1] * self._secs_per_byte("all-gather", mesh, axis)
            return secs + local[-1] * self._secs_per_byte("all-to-all", mesh, axis)
        kind = "all-reduce" if wanted is None else "reduce-scatter"
        return secs + local[-1] * self._secs_per_byte(kind, mesh, axis)

    def _secs_per_byte(self, kind: str, mesh: Mesh, axis: str) -> float:
        """Returns the time of a collective along an axis, for each byte of its result."""
        key = kind, mesh, axis
        if key not in self._collectives:
            network = networks.network(self._topology, mesh)
            self._collectives[key] = networks.secs_per_byte(network, mesh, kind, [axis])
        return self._collectives[key]


def _letter_by_axis(letters: Sequence[str], rows: Rows) -> dict[str, str]:
    """Returns the letter that each axis splits in a tensor."""
    by_axis = {}
    for letter, axes in zip(letters, split(letters, rows), strict=True):
        for axis in axes:
            by_axis[axis] = letter
    return by_axis


def _operations(letters: Letters) -> dict[_Operation, int]:
    """Returns how often a call runs each kind of operation."""
    sizes = letters.reading.sets.sizes
    counts = collections.Counter[_Operation]()
    for operation in letters.reading.operations:
        tensors: tuple[Dims, ...] = (*operation.operands, operation.result)
        num_bytes = []
        for dims, element_bytes in zip(tensors, operation.element_bytes, strict=True):
            num_bytes.append(element_bytes * math.prod(sizes[dim] for dim in dims))
        kind = _Operation(
            operands=tuple(map(letters.of, operation.operands)),
            result=letters.of(operation.result),
            num_bytes=tuple(num_bytes),
            flops=operation.flops,
            whole=frozenset(letters.of(operation.whole)) - {NONE},
        )
        counts[kind] += operation.times
    return dict(counts)
