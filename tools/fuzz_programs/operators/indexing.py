"""Operators that read or write elements by their indices: gathers, scatters, segments."""

import math

from tools.fuzz_programs.draft import Draft, Tensor
from tools.fuzz_programs.program import FLOATS
from tools.fuzz_programs.registry import Call, NoOperands, family

_NUMBERS = (*FLOATS, "int32")
_COUNTS = (1, 3, 5, 7, 8, 11, 13)


@family({"gather": "tf.gather({0}, {1}, axis={axis}, batch_dims={batch_dims})"}, weight=2.0)
def gather(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=_NUMBERS)
    batch_dims = draft.rng.randint(0, min(1, x.rank - 1))
    axis = draft.rng.randint(batch_dims, x.rank - 1)
    shape = list(x.shape[:batch_dims])
    for _ in range(draft.rng.randint(1, 2)):
        shape.append(draft.rng.choice(_COUNTS))
    ids = draft.ids(shape, x.shape[axis])
    return Call([x, ids], {"axis": axis, "batch_dims": batch_dims}, below=x.below)


def _flat_ids(draft: Draft, x: Tensor) -> tuple[Tensor, dict[str, list[int]]]:
    """Returns flat ids of elements of some leading dims, and the attributes of _UNRAVELED."""
    indexed = list(x.shape[: draft.rng.randint(1, x.rank)])
    strides = [math.prod(indexed[i + 1 :]) for i in range(len(indexed))]
    ids = draft.ids((draft.rng.choice(_COUNTS),), math.prod(indexed))
    return ids, {"indexed": indexed, "strides": strides}


# The coordinates of each flat id, as a row.
_UNRAVELED = "{1}[:, None] // {strides} % {indexed}"


@family({"gather_nd": f"tf.gather_nd({{0}}, {_UNRAVELED})"})
def gather_nd(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=_NUMBERS)
    ids, attributes = _flat_ids(draft, x)
    return Call([x, ids], attributes, below=x.below)


@family(
    {
        "scatter_add": f"tf.tensor_scatter_nd_add({{0}}, {_UNRAVELED}, {{2}})",
        "scatter_subtract": f"tf.tensor_scatter_nd_sub({{0}}, {_UNRAVELED}, {{2}})",
        "scatter_max": f"tf.tensor_scatter_nd_max({{0}}, {_UNRAVELED}, tf.stop_gradient({{2}}))",
        "scatter_min": f"tf.tensor_scatter_nd_min({{0}}, {_UNRAVELED}, tf.stop_gradient({{2}}))",
        "scatter_nd": f"{{0}} + tf.scatter_nd({_UNRAVELED}, {{2}}, {{shape}})",
    },
    weight=1.5,
)
def scatter(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=_NUMBERS)
    ids, attributes = _flat_ids(draft, x)
    row = x.shape[len(attributes["indexed"]) :]
    updates = draft.like([*ids.shape, *row], x.dtype)
    return Call([x, ids, updates], {**attributes, "shape": list(x.shape)})


# The ids differ, so that each row is written at most once.
@family({"scatter_update": "tf.tensor_scatter_nd_update({0}, {indices}, {1})"}, weight=0.6)
def scatter_update(draft: Draft) -> Call:
    x = draft.pick_full(dtypes=_NUMBERS)
    count = draft.rng.randint(1, min(x.shape[0], 7))
    rows = draft.rng.sample(range(x.shape[0]), count)
    updates = draft.like([count, *x.shape[1:]], x.dtype)
    return Call([x, updates], {"indices": [[row] for row in rows]})


@family(
    {
        "segment_sum": "tf.math.unsorted_segment_sum({0}, {1}, {count})",
        "segment_mean": "tf.math.unsorted_segment_mean({0}, {1}, {count})",
        "segment_max": "tf.maximum(tf.math.unsorted_segment_max({0}, {1}, {count}), -9)",
        "segment_min": "tf.minimum(tf.math.unsorted_segment_min({0}, {1}, {count}), 9)",
        "segment_prod": "tf.math.unsorted_segment_prod({0}, {1}, {count})",
        "segment_sqrt_n": "tf.math.unsorted_segment_sqrt_n({0}, {1}, {count})",
    },
    weight=1.5,
)
def segment(draft: Draft) -> Call:
    x = draft.pick_full()
    count = draft.rng.choice((2, 3, 5, 6, 7, 8, 13))
    num_dims = draft.rng.randint(1, min(2, x.rank))
    return Call([x, draft.ids(x.shape[:num_dims], count)], {"count": count})


@family(
    {
        "bincount": (
            "tf.raw_ops.DenseBincount(input={0}, size={count}, weights=tf.constant([], tf.int32))"
        )
    },
    weight=0.4,
)
def bincount(draft: Draft) -> Call:
    x = draft.pick(dtypes=("int32",), max_rank=1, where=lambda tensor: 0 < tensor.below)
    return Call([x], {"count": x.below})


@family(
    {
        "one_hot": "tf.one_hot({0}, {depth}, axis={axis})",
        "one_hot_values": "tf.one_hot({0}, {depth}, on_value=0.7, off_value=-0.2, axis={axis})",
    },
    weight=0.8,
)
def one_hot(draft: Draft) -> Call:
    x = draft.pick(dtypes=("int32",), min_rank=0, max_rank=3)
    axis = draft.rng.choice((-1, 0))
    return Call([x], {"depth": draft.rng.choice((3, 7, 8, 11)), "axis": axis})


@family({"embedding": "tf.gather(tf.exp({0} * 0.3), {1})"}, weight=0.8)
def embedding(draft: Draft) -> Call:
    x = draft.pick_full(min_rank=2, max_rank=2)
    shape = [draft.rng.choice(_COUNTS) for _ in range(draft.rng.randint(1, 2))]
    return Call([x, draft.ids(shape, x.shape[0])])


@family({"integers": "tf.range({count}) * 3 % {below}"}, weight=0.2)
def constant_ids(draft: Draft) -> Call:
    if not draft.tensors:
        raise NoOperands
    below = draft.rng.choice((3, 5, 7))
    return Call([], {"count": draft.rng.choice(_COUNTS), "below": below}, below=below)
