"""Repairs of operators that XLA's partitioner gets wrong, mostly where parts are uneven.

Where the devices do not divide a dim, XLA rounds it up, and the last parts end with padding. Its
partitioner then gives some operators wrong values, without an error
(examples/partitioner_faults/README.md):

- a scatter lets rows of padding take part, so that row 0 of its result gets them
  (scatter_rows.py);
- a gather takes parts of other shapes for its rows, and ends in an error (gather_rows.py);
- an operator that moves the elements of a dim, such as a slice, takes elements of wrong parts
  (whole_dims.py);
- convolutions and the gradient of pooling take copies for parts, and more (window_parts.py);
- products add up the wrong sums if their tensors are split along several axes and do not fit
  together (products.py);
- some reshapes to fewer dims end the process (reshapes.py).

If a tensor of any of these operators is split over a mesh whose device order differs from the
program's, XLA may take the wrong devices, so all the operator's tensors are kept whole
(placements.keep_in_order). A Fourier transform fails if its dims are split at all (fourier.py).

Which dims are split, and how many ways, is known once the annotations have been propagated. So
Shardy's propagation runs on a copy of the program first, and only operators that it splits in one
of these ways are changed. Only Fourier transforms, and slices of one element with a stride, are
changed in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.annotations import sharding_attributes
from xla_spmd.repairs import (
    fourier,
    gather_rows,
    placements,
    products,
    reshapes,
    scatter_rows,
    whole_dims,
    window_parts,
)
from xla_spmd.repairs.placements import Placement
from xla_spmd.runtime.jax_private import ir

# A repair changes placements elsewhere, where another one may be needed.
_MOST_ROUNDS = 8
_SUSPECTS = frozenset(
    [*products.PRODUCTS, scatter_rows.SCATTER, *window_parts.OPERATORS, *whole_dims.MOVING]
)


def repair(what: str, module: Any, num_devices: int) -> None:
    """Changes the operators of an ir.Module that XLA would partition wrongly, in place.

    Raises ValueError, which begins with the program `what`, if the repairs do not come to an end.
    """
    _keep_transforms_executable(module)
    for operation in _operations(module.body):
        if operation.name == whole_dims.SLICE:
            whole_dims.drop_stride(operation)

    for _ in range(_MOST_ROUNDS):
        changed = _round(module, num_devices)
        if not changed:
            return

    names = sorted({sharding_attributes.location(operation.results[0]) for operation in changed})
    raise ValueError(
        f"{what}: the placements of {', '.join(names)} change with each repair, after "
        f"{_MOST_ROUNDS} of them; annotate the results of these operators as whole."
    )


def _round(module: Any, num_devices: int) -> list[Any]:
    """Repairs the operations of an ir.Module by its placements; returns those it has changed."""
    suspects = _suspects(module)
    if not suspects:
        return []
    changed = []
    mismatched = []
    for operation, places in zip(suspects, placements.propagated(module, suspects), strict=True):
        if _is_repaired(operation, places, num_devices):
            changed.append(operation)
        elif operation.name in products.PRODUCTS and products.is_mismatched(operation, places):
            mismatched.append(operation)
    if changed or not mismatched:
        return changed  # Which may change the placements of the products.

    for operation, places in zip(mismatched, placements.matched(module, mismatched), strict=True):
        products.match(operation, places)
    return mismatched


def _suspects(module: Any) -> list[Any]:
    """Returns the operations of an ir.Module that XLA may partition wrongly."""
    operations = list(_operations(module.body))
    rotating = whole_dims.rotating(operations)
    suspects = []
    for operation in operations:
        is_suspect = operation.name in _SUSPECTS and operation not in rotating
        if is_suspect or (operation.name == reshapes.RESHAPE and reshapes.divided_dims(operation)):
            suspects.append(operation)
    return suspects


def _is_repaired(operation: Any, places: Sequence[Placement], num_devices: int) -> bool:
    """Repairs an operation if its places need it; returns whether it has changed anything."""
    with ir.InsertionPoint(operation), operation.location:
        if placements.keep_in_order(operation, places):
            return True
        if operation.name in products.PRODUCTS:
            return False
        if operation.name == reshapes.RESHAPE:
            return reshapes.keep_whole(operation, places)
        if operation.name == scatter_rows.SCATTER:
            return scatter_rows.pad(operation, places)
        if operation.name in window_parts.OPERATORS:
            return window_parts.repair(operation, places, num_devices)

        is_changed = whole_dims.keep(operation, places)
        if operation.name == gather_rows.GATHER:
            is_changed |= gather_rows.keep_indices(operation, places)
        return is_changed


def _keep_transforms_executable(module: Any) -> None:
    """Fixes the layouts and the placements of an ir.Module's Fourier transforms."""
    operations = set(_operations(module.body))
    partitioned = []
    for view in list(stablehlo.walk(module.body)):
        if view.operation.name == fourier.TRANSFORM:
            if view.operation in operations:
                partitioned.append(view.operation)
            else:
                fourier.keep_executable(view.operation)

    if partitioned:
        placed = placements.propagated(module, partitioned)
        for transform, places in zip(partitioned, placed, strict=True):
            fourier.keep_executable(transform, places)


def _operations(block: Any) -> Iterable[Any]:
    """Yields the operations of a block and of all blocks inside it.

    The inside of a manual computation is left out: there, a partition's part ends without padding.
    """
    for view in block.operations:
        operation = view.operation
        yield operation
        if operation.name != "sdy.manual_computation":
            for region in operation.regions:
                for inner in region.blocks:
                    yield from _operations(inner)
