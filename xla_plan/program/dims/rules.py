"""The dims of an operation's results, from its operands' dims: a rule for each kind.

Two dims are the same if they meet: in the contraction or the batch of a product, in an elementwise
operation, or in a write into a tensor. Operations that may communicate are recorded in the notes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from xla_plan.program.dims.dim_sets import Dims
from xla_plan.program.dims.notes import Notes, Tensor, made_of
from xla_spmd import stablehlo
from xla_spmd.runtime import jax_private

# A rule takes the notes, an operation of MLIR and its operands, and returns its results.
Rule = Callable[[Notes, Any, list[Tensor]], list[Tensor]]


def elementwise(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """A result with an operand's shape has its dims; a result of another shape has new dims."""
    results = []
    for value in operation.results:
        shape = stablehlo.shape(value)
        alike = [tensor for tensor in operands if notes.shape(tensor) == shape]
        for tensor in alike[1:]:
            notes.unite(alike[0].dims, tensor.dims)
        dims = alike[0].dims if alike else notes.fresh(shape)
        results.append(Tensor(dims, made_of(operands)))
    return results


def dot_general(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """Contracted dims meet, and batch dims meet; the result has the batch and the free dims."""
    attributes = operation.operation.attributes
    numbers = jax_private.dimension_numbers(attributes["dot_dimension_numbers"])
    lhs, rhs = (tensor.dims for tensor in operands)
    batch = list(numbers.lhs_batching_dimensions)
    summed = list(numbers.lhs_contracting_dimensions)
    rhs_batch = list(numbers.rhs_batching_dimensions)
    rhs_summed = list(numbers.rhs_contracting_dimensions)
    notes.unite([lhs[i] for i in batch], [rhs[i] for i in rhs_batch])
    notes.unite([lhs[i] for i in summed], [rhs[i] for i in rhs_summed])

    lhs_free = [dim for i, dim in enumerate(lhs) if i not in batch + summed]
    rhs_free = [dim for i, dim in enumerate(rhs) if i not in rhs_batch + rhs_summed]
    result = (*(lhs[i] for i in batch), *lhs_free, *rhs_free)
    size = math.prod(notes.sets.sizes[dim] for dim in (*result, *(lhs[i] for i in summed)))
    notes.record(operation, operands, result, flops=2.0 * size)
    return [Tensor(result, made_of(operands))]


def convolution(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """Batch and feature dims are like a product's; spatial dims are new."""
    attributes = operation.operation.attributes
    numbers = jax_private.dimension_numbers(attributes["dimension_numbers"])
    images, kernel = (tensor.dims for tensor in operands)
    result = list(notes.new(operation.results[0]))
    sizes = [notes.sets.sizes[dim] for dim in (*result, *kernel)]

    # Groups split the features or the rows into dims of other sizes.
    features = kernel[numbers.kernel_output_feature_dimension]
    if attributes["batch_group_count"].value == 1:
        result[numbers.output_batch_dimension] = images[numbers.input_batch_dimension]
    result[numbers.output_feature_dimension] = features
    if attributes["feature_group_count"].value == 1:
        summed = kernel[numbers.kernel_input_feature_dimension]
        notes.sets.unite(images[numbers.input_feature_dimension], summed)

    flops = 2.0 * math.prod(sizes) / notes.sets.sizes[features]
    whole = tuple(images[i] for i in numbers.input_spatial_dimensions)
    notes.record(operation, operands, tuple(result), flops, whole)
    return [Tensor(tuple(result), made_of(operands))]


def transpose(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """The result has the same dims in another order."""
    (tensor,) = operands
    order = operation.operation.attributes["permutation"]
    return [Tensor(tuple(tensor.dims[i] for i in order), tensor.buffers)]


def broadcast_in_dim(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """Dims that keep their size are the same; repeated dims are new."""
    (tensor,) = operands
    dims = list(notes.new(operation.results[0]))
    places = operation.operation.attributes["broadcast_dimensions"]
    for dim, place in zip(tensor.dims, places, strict=True):
        if notes.sets.sizes[dim] == notes.sets.sizes[dims[place]]:
            dims[place] = dim
    return [Tensor(tuple(dims), tensor.buffers)]


def reshape(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """Dims that are kept are the same; the parts of split and merged dims are noted."""
    (tensor,) = operands
    dims = notes.new(operation.results[0])
    sizes = notes.sets.sizes
    before = [dim for dim in tensor.dims if sizes[dim] > 1]
    after = [dim for dim in dims if sizes[dim] > 1]

    # From left to right, find the fewest dims on both sides with the same number of elements.
    while before and after:
        some = [before.pop(0)]
        others = [after.pop(0)]
        while math.prod(sizes[d] for d in some) != math.prod(sizes[d] for d in others):
            if math.prod(sizes[d] for d in some) < math.prod(sizes[d] for d in others):
                some.append(before.pop(0))
            else:
                others.append(after.pop(0))

        if len(some) == len(others) == 1:
            notes.sets.unite(some[0], others[0])
        elif len(some) == 1:
            notes.wholes.append((some[0], tuple(others)))
        elif len(others) == 1:
            notes.wholes.append((others[0], tuple(some)))
    return [Tensor(dims, tensor.buffers)]


def reduce(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """The result has the dims that are not reduced."""
    tensors = operands[: len(operands) // 2]
    for tensor in tensors[1:]:
        notes.unite(tensors[0].dims, tensor.dims)
    reduced = set(operation.operation.attributes["dimensions"])
    result = tuple(dim for i, dim in enumerate(tensors[0].dims) if i not in reduced)
    notes.record(operation, tensors, result)
    return [Tensor(result, made_of(tensors)) for _ in operation.results]


def same_sizes(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """Dims that keep their size are the same; the others are read at other places."""
    shape = stablehlo.shape(operation.results[0])
    result, changed = _kept_dims(notes, operands[0].dims, shape)
    if changed:
        notes.record(operation, operands[:1], result, whole=changed)
    return [Tensor(result, operands[0].buffers) for _ in operation.results]


def concatenate(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """All dims meet, except the concatenated one."""
    along = operation.operation.attributes["dimension"].value
    result = list(operands[0].dims)
    for tensor in operands[1:]:
        notes.unite(result[:along], tensor.dims[:along])
        notes.unite(result[along + 1 :], tensor.dims[along + 1 :])
    result[along] = notes.new(operation.results[0])[along]
    whole = (result[along], *(tensor.dims[along] for tensor in operands))
    notes.record(operation, operands, tuple(result), whole=whole)
    return [Tensor(tuple(result), made_of(operands))]


def dynamic_slice(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """Sliced dims are iterated over, as loops iterate over layers."""
    shape = stablehlo.shape(operation.results[0])
    result, changed = _kept_dims(notes, operands[0].dims, shape)
    notes.sequential.update(changed)
    return [Tensor(result, operands[0].buffers)]


def dynamic_update_slice(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """The updated tensor keeps its dims, and they meet the update's."""
    tensor = operands[0]
    for dim, update in zip(tensor.dims, operands[1].dims, strict=True):
        if notes.sets.sizes[dim] == notes.sets.sizes[update]:
            notes.sets.unite(dim, update)
        else:
            notes.sequential.add(dim)
    return [tensor]


def gather(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """Whole rows keep the dims of the table; the other dims are the indices'."""
    attributes = operation.operation.attributes
    numbers = jax_private.dimension_numbers(attributes["dimension_numbers"])
    table, indices = operands
    batch = list(numbers.operand_batching_dims)
    notes.unite(
        [table.dims[i] for i in batch],
        [indices.dims[i] for i in numbers.start_indices_batching_dims],
    )

    # Whole rows of the table keep its dims; the others get the indices' dims.
    slice_sizes = list(attributes["slice_sizes"])
    in_rows = set(range(len(table.dims))) - {*numbers.collapsed_slice_dims, *batch}
    notes.tables.append((table.dims, frozenset(in_rows)))
    rows = []
    for i in sorted(in_rows):
        is_whole = slice_sizes[i] == notes.sets.sizes[table.dims[i]]
        rows.append(table.dims[i] if is_whole else notes.sets.new(slice_sizes[i]))
    others = [dim for i, dim in enumerate(indices.dims) if i != numbers.index_vector_dim]

    result = []
    for place in range(len(rows) + len(others)):
        result.append(rows.pop(0) if place in numbers.offset_dims else others.pop(0))
    notes.record(operation, operands, tuple(result))
    return [Tensor(tuple(result), made_of(operands))]


def scatter(notes: Notes, operation: Any, operands: list[Tensor]) -> list[Tensor]:
    """The dims of added rows meet the table's, and the other dims meet the indices'."""
    attributes = operation.operation.attributes
    numbers = jax_private.dimension_numbers(attributes["scatter_dimension_numbers"])
    count = len(operands) // 2
    tables = operands[:count]
    indices = operands[count]
    batch = list(numbers.input_batching_dims)
    for table, update in zip(tables, operands[count + 1 :], strict=True):
        notes.unite(
            [table.dims[i] for i in batch],
            [indices.dims[i] for i in numbers.scatter_indices_batching_dims],
        )

        outside = [*numbers.inserted_window_dims, *batch]
        rows = [dim for i, dim in enumerate(table.dims) if i not in outside]
        others = [dim for i, dim in enumerate(indices.dims) if i != numbers.index_vector_dim]
        for place, dim in enumerate(update.dims):
            is_row = place in numbers.update_window_dims
            notes.sets.unite(rows.pop(0) if is_row else others.pop(0), dim)
        notes.record(operation, [update, indices], table.dims)
    return [Tensor(table.dims, made_of(operands)) for table in tables]


def _kept_dims(notes: Notes, dims: Dims, shape: Sequence[int]) -> tuple[Dims, Dims]:
    """Returns the dims of a result of `shape`, and the operand's dims whose size it changes."""
    result = []
    changed = []
    for dim, size in zip(dims, shape, strict=True):
        if notes.sets.sizes[dim] == size:
            result.append(dim)
        else:
            result.append(notes.sets.new(size))
            changed.append(dim)
    return tuple(result), tuple(changed)


# The rules by the names of their operations. All others are elementwise.
RULES: dict[str, Rule] = {
    "stablehlo.dot_general": dot_general,
    "stablehlo.convolution": convolution,
    "stablehlo.transpose": transpose,
    "stablehlo.broadcast_in_dim": broadcast_in_dim,
    "stablehlo.reshape": reshape,
    "stablehlo.reduce": reduce,
    "stablehlo.slice": same_sizes,
    "stablehlo.pad": same_sizes,
    "stablehlo.reduce_window": same_sizes,
    "stablehlo.concatenate": concatenate,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update_slice,
    "stablehlo.gather": gather,
    "stablehlo.scatter": scatter,
}
