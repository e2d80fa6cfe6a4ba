"""Dims that are kept whole, since XLA's partitioner moves the elements of their parts wrongly.

An operator that moves the elements of a dim, such as a slice or a concatenation, takes elements of
wrong parts if the dim is split unevenly. Its operands and its result are kept whole along it. There
are two exceptions, in which XLA exchanges the right elements: each part needs elements of adjacent
parts alone, or the longer one of operand and result is split evenly and contains the other.

A padding between elements, and one that cuts elements off, is also wrong along an even dim if the
result is split and the operand is whole. Both together end the process if anything is split.
Equations whose matrices are split are refused by the compiler, or end the process. These dims are
kept whole, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement
from xla_spmd.runtime import jax_private
from xla_spmd.runtime.jax_private import ir

SLICE = "stablehlo.slice"
_BARRIER = "stablehlo.optimization_barrier"


def keep(operation: Any, places: Sequence[Placement]) -> bool:
    """Keeps the dims whole that an operation of MOVING would move wrongly in any of its places.

    Returns whether it has changed anything.
    """
    moves = MOVING[operation.name](operation)
    dims = {dim for dim in moves.dims if _must_be_whole(operation, moves, dim, places)}
    if not dims:
        is_cut_in_place = (0,) in moves.shifts.values() and _has_same_parts(operation, places)
        return is_cut_in_place and _set_apart(operation)

    # XLA moves the operands to the devices of the result before it computes, so the result is kept
    # whole as well.
    for number in moves.operands:
        splits = [place.operands[number] for place in places]
        operation.operands[number] = placements.unsplit(operation.operands[number], dims, splits)
    if moves.moves_result:
        placements.unsplit_result(operation, dims, [place.results[0] for place in places])
    return True


def _has_same_parts(operation: Any, places: Sequence[Placement]) -> bool:
    """Returns whether the result, split like the operand, has parts of the operand's shape.

    One place is enough. A result that is whole counts, too: XLA first cuts each part in place.
    """
    shapes = [stablehlo.shape(value) for value in (operation.operands[0], operation.results[0])]
    for place in places:
        ways = place.operands[0].ways
        operand_parts, result_parts = (
            [-(-size // count) for size, count in zip(shape, ways, strict=True)] for shape in shapes
        )
        if operand_parts == result_parts:
            return True
    return False


def _set_apart(operation: Any) -> bool:
    """Puts a barrier behind a tensor that is cut or lengthened in place; returns whether it did.

    On each partition, the part of the result is the part of the operand. Where both are moved, XLA
    reuses the moved operand as the moved result, though their sizes differ.
    """
    operand = operation.operands[0]
    (result,) = operation.results
    users = [use.owner.operation for use in result.uses]
    is_apart = [user.name for user in users] == [_BARRIER]
    if is_apart or sum(1 for _ in operand.uses) == 1:
        return False

    barrier = ir.Operation.create(_BARRIER, results=[result.type], operands=[result])
    barrier.move_after(operation)
    result.replace_all_uses_except(barrier.results[0], barrier)
    return True


def drop_stride(slice_: Any) -> None:
    """Gives a stablehlo.slice the stride 1 along the dims of which it takes one element.

    XLA fails at a split dim if a longer stride leaves one element.
    """
    sizes = stablehlo.shape(slice_.results[0])
    starts = list(ir.DenseI64ArrayAttr(slice_.attributes["start_indices"]))
    limits = list(ir.DenseI64ArrayAttr(slice_.attributes["limit_indices"]))
    strides = list(ir.DenseI64ArrayAttr(slice_.attributes["strides"]))
    for dim, size in enumerate(sizes):
        if size == 1 and strides[dim] > 1:
            strides[dim] = 1
            limits[dim] = starts[dim] + 1
    slice_.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits)
    slice_.attributes["strides"] = ir.DenseI64ArrayAttr.get(strides)


def rotating(operations: Iterable[Any]) -> set[Any]:
    """Returns the concatenations that rotate a tensor, and their slices.

    These are x[a:] before x[:a], and x between its own last and first elements. XLA partitions them
    as a whole, and rightly, unless it finds some of their slices placed otherwise.
    """
    rotations: set[Any] = set()
    for operation in operations:
        if operation.name == "stablehlo.concatenate" and _is_rotation(operation):
            slices = [value.owner for value in operation.operands if _is_slice(value)]
            rotations |= {operation, *slices}
    return rotations


def _is_rotation(concatenation: Any) -> bool:
    dim = ir.IntegerAttr(concatenation.attributes["dimension"]).value
    sources = set()
    spans: list[tuple[int, int]] = []
    for value in concatenation.operands:
        sources.add(value.owner.operands[0] if _is_slice(value) else value)
        span = _span(value, dim)
        if span is None:
            return False
        spans.append(span)
    if len(sources) > 1:
        return False

    size = stablehlo.shape(sources.pop())[dim]
    if len(spans) not in (2, 3):
        return False
    (begin, end), *between, (first, last) = spans
    if end != size or first != 0:
        return False
    return between == [(0, size)] if between else begin == last


def _span(value: Any, dim: int) -> tuple[int, int] | None:
    """Returns which elements of a dim a slice takes, or all for another value.

    Returns None for a slice with a stride, and for one that cuts another dim as well.
    """
    if not _is_slice(value):
        return (0, stablehlo.shape(value)[dim])
    moves = _of_slice(value.owner)
    if not moves.dims <= {dim} or moves.dims != moves.shifts.keys():
        return None
    (start,) = moves.shifts.get(dim, (0,))
    return (start, start + stablehlo.shape(value)[dim])


def _is_slice(value: Any) -> bool:
    is_argument = isinstance(value.owner, ir.Block)
    return not is_argument and value.owner.operation.name == SLICE


def _must_be_whole(operation: Any, moves: _Moves, dim: int, places: Sequence[Placement]) -> bool:
    """Returns whether a dim is split unevenly in any place, so that elements may be misplaced."""
    sizes = [stablehlo.shape(operation.operands[number])[dim] for number in moves.operands]
    if moves.moves_result:
        sizes.append(stablehlo.shape(operation.results[0])[dim])

    for place in places:
        splits = [place.operands[number] for number in moves.operands]
        if moves.moves_result:
            splits.append(place.results[0])
        ways = [split.ways[dim] for split in splits]

        if dim in moves.never_split and max(ways) > 1:
            return True
        if dim in moves.result_alone and splits[0].ways[dim] == 1 < ways[-1]:
            return True

        is_even = all(size % count == 0 for size, count in zip(sizes, ways, strict=True))
        is_in_place = len({(split.mesh, split.axes[dim]) for split in splits}) == 1
        is_right = False
        if is_in_place and dim in moves.shifts:
            # Each operand beside the result.
            shifts = list(zip(sizes[:-1], moves.shifts[dim], strict=True))
            is_near = all(_is_near(size, sizes[-1], ways[0], shift) for size, shift in shifts)
            is_inside = all(_is_inside(size, sizes[-1], shift) for size, shift in shifts)
            is_right = is_near or (is_inside and max(sizes) % ways[0] == 0)
        if not is_even and not is_right:
            return True
    return False


def _is_inside(operand_size: int, result_size: int, shift: int) -> bool:
    """Returns whether the result is a part of the operand, or the operand a part of the result.

    Element i of the result is element i + shift of the operand.
    """
    is_cut = shift >= 0 and shift + result_size <= operand_size
    is_lengthened = shift <= 0 and operand_size - shift <= result_size
    return is_cut or is_lengthened


def _is_near(operand_size: int, result_size: int, num_parts: int, shift: int) -> bool:
    """Returns whether each part needs only its own and the adjacent parts of the operand.

    XLA then exchanges halos, and rightly so. The operand and the result have these sizes and as
    many parts. Element i of the result is element i + shift of the operand.
    """
    operand_part = -(-operand_size // num_parts)
    result_part = -(-result_size // num_parts)
    for part in range(num_parts):
        begin = max(part * result_part + shift, 0)
        end = min(min((part + 1) * result_part, result_size) + shift, operand_size)
        if begin >= end:
            continue
        first = begin // operand_part
        last = (end - 1) // operand_part
        if first < part - 1 or last > part + 1:
            return False
    return True


@dataclasses.dataclass(frozen=True)
class _Moves:
    """The dims along which an operation moves elements."""

    dims: frozenset[int]
    operands: tuple[int, ...] = (0,)  # The operands that have these dims.
    moves_result: bool = True  # Whether the result has them.
    # By dim, how far the elements of the result are from where they were in each of the operands,
    # if all of them move by the same distance. A dim without an entry is moved otherwise.
    shifts: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    # The dims that must be whole even if they are split evenly.
    never_split: frozenset[int] = frozenset()
    # The dims that the result alone must not split, not even evenly.
    result_alone: frozenset[int] = frozenset()


def _of_slice(operation: Any) -> _Moves:
    operand = stablehlo.shape(operation.operands[0])
    result = stablehlo.shape(operation.results[0])
    dims = frozenset(dim for dim, size in enumerate(result) if size != operand[dim])
    starts = ir.DenseI64ArrayAttr(operation.attributes["start_indices"])
    strides = ir.DenseI64ArrayAttr(operation.attributes["strides"])
    shifts = {dim: (starts[dim],) for dim in dims if strides[dim] == 1}
    return _Moves(dims, shifts=shifts)


def _of_dynamic_slice(operation: Any) -> _Moves:
    operand = stablehlo.shape(operation.operands[0])
    result = stablehlo.shape(operation.results[0])
    return _Moves(frozenset(dim for dim, size in enumerate(result) if size != operand[dim]))


def _of_update(operation: Any) -> _Moves:
    operand = stablehlo.shape(operation.operands[0])
    update = stablehlo.shape(operation.operands[1])
    dims = frozenset(dim for dim, size in enumerate(update) if size != operand[dim])
    return _Moves(dims, operands=(0, 1))


def _of_pad(operation: Any) -> _Moves:
    low = list(ir.DenseI64ArrayAttr(operation.attributes["edge_padding_low"]))
    high = list(ir.DenseI64ArrayAttr(operation.attributes["edge_padding_high"]))
    interior = list(ir.DenseI64ArrayAttr(operation.attributes["interior_padding"]))

    dims = set()
    shifts = {}
    never_split = set()
    result_alone = set()
    for dim in range(len(low)):
        cuts = min(low[dim], high[dim]) < 0
        if low[dim] == high[dim] == interior[dim] == 0:
            continue
        dims.add(dim)
        if interior[dim] == 0:
            shifts[dim] = (-low[dim],)
        if interior[dim] and cuts:
            never_split.add(dim)
        elif interior[dim] or cuts:
            result_alone.add(dim)
    return _Moves(
        frozenset(dims),
        shifts=shifts,
        never_split=frozenset(never_split),
        result_alone=frozenset(result_alone),
    )


def _of_concatenation(operation: Any) -> _Moves:
    dim = ir.IntegerAttr(operation.attributes["dimension"]).value
    shifts = []
    begin = 0
    for operand in operation.operands:
        shifts.append(-begin)
        begin += stablehlo.shape(operand)[dim]
    numbers = tuple(range(len(operation.operands)))
    return _Moves(frozenset([dim]), operands=numbers, shifts={dim: tuple(shifts)})


def _of_reversal(operation: Any) -> _Moves:
    return _Moves(frozenset(ir.DenseI64ArrayAttr(operation.attributes["dimensions"])))


def _of_gather(operation: Any) -> _Moves:
    numbers = jax_private.dimension_numbers(operation.attributes["dimension_numbers"])
    dims = frozenset(numbers.start_index_map)
    return _Moves(dims, moves_result=False)


def _of_matrices(operation: Any) -> _Moves:
    rank = len(stablehlo.shape(operation.results[0]))
    operands = tuple(range(len(operation.operands)))
    dims = frozenset([rank - 2, rank - 1])
    return _Moves(dims, operands, never_split=dims)


MOVING: dict[str, Callable[[Any], _Moves]] = {
    "stablehlo.cholesky": _of_matrices,
    "stablehlo.concatenate": _of_concatenation,
    "stablehlo.dynamic_slice": _of_dynamic_slice,
    "stablehlo.dynamic_update_slice": _of_update,
    "stablehlo.gather": _of_gather,
    "stablehlo.pad": _of_pad,
    "stablehlo.reverse": _of_reversal,
    SLICE: _of_slice,
    "stablehlo.triangular_solve": _of_matrices,
}
