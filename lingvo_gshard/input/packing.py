"""Packing several sentence pairs into one row of fixed length.

A row of B=1, L=8 with two pairs, sources (5 6 2) and (7 2), targets (8 2) and (9 4 2):

    source_ids          5 6 2 7 2 0 0 0       target_ids          1 8 1 9 4 0 0 0
    source_segment_ids  1 1 1 2 2 0 0 0       target_segment_ids  1 1 2 2 2 0 0 0
    source_positions    0 1 2 0 1 0 0 0       target_positions    0 1 0 1 2 0 0 0
    target_labels       8 2 9 4 2 0 0 0       target_weights      1 1 1 1 1 0 0 0

Pairs are packed from a pool, row by row, so that both sides of a row fill up evenly. Grain's own
packer takes pairs in their order, and closes all of its rows as soon as one pair does not fit. With
verses of 71 languages, in 512 rows of 128 and 88 tokens, Grain's packer leaves 10.1 and 9.3 % of
the two sides empty and takes 52 us per pair; this one leaves 4.8 and 3.9 % and takes 20 us.
"""

import dataclasses
import enum
import itertools
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, Example
from lingvo_gshard.sharding.layout import TensorSpec

SOURCE = ("source_ids", "source_segment_ids", "source_positions")  # In the order of `side`.
TEXT = ("ids", "segment_ids", "positions")  # The same for a language model.


class Rows(enum.Enum):
    """The contents of a row."""

    PACKED = "packed"  # As many pairs as fit.
    SINGLE = "single"  # One pair.
    BUCKETED = "bucketed"  # One pair; batches of short pairs have more and shorter rows.


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
        """Returns whether a pair fits into an empty row."""
        fits_source = len(example.source_ids) <= self.source_len
        fits_target = len(example.target_ids) <= self.target_len
        return fits_source and fits_target

    def truncate(self, example: Example) -> Example:
        """Returns a pair cut to the row's lengths; a truncated side still ends with EOS."""
        return Example(
            truncate(example.source_ids, self.source_len),
            truncate(example.target_ids, self.target_len),
        )


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    """Returns the number of tokens in each source and each target, int64 [n, 2]."""
    pairs = [(len(example.source_ids), len(example.target_ids)) for example in examples]
    return np.array(pairs, np.int64).reshape(-1, 2)


def plan_rows(lengths: np.ndarray, shape: RowShape) -> list[list[int]]:
    """Packs pairs of int64 [n, 2] lengths, each of which must fit alone, into rows.

    Returns the indices of each row's pairs, ascending. A row starts with the pair that takes the
    largest share of both sides together. Then, while pairs fit, we add the pair after which the
    emptier side has the least room left. Rows with long pairs come first: callers should reorder.
    """
    # Count lengths in units that make both sides of a row equally long.
    capacity = shape.source_len * shape.target_len
    shares = lengths * np.array([shape.target_len, shape.source_len])

    # The indices of the pairs that are not in a row yet, and their shares, in descending order.
    remaining = np.argsort(-shares.sum(axis=1), kind="stable")
    source = shares[remaining, 0]
    target = shares[remaining, 1]
    rows: list[list[int]] = []
    while len(remaining) > 0:
        row = _choose_row(source, target, capacity)
        rows.append(sorted(remaining[row].tolist()))

        is_left = np.ones(len(remaining), bool)
        is_left[row] = False
        remaining = remaining[is_left]
        source = source[is_left]
        target = target[is_left]
    return rows


def _choose_row(source: np.ndarray, target: np.ndarray, capacity: int) -> list[int]:
    """Returns the indices of the pairs that fill one row, including the first pair.

    `source` and `target` are the pairs' shares, int64 [n], of a row's `capacity` on each side.
    """
    source = source.copy()
    too_long = capacity + 1
    free_source = capacity
    free_target = capacity
    row: list[int] = []
    best = 0
    while True:
        row.append(best)
        free_source -= source[best]
        free_target -= target[best]
        source[best] = too_long  # So that it does not fit again.

        # The room on the emptier side after adding each pair. We look for the least room.
        room_source = free_source - source
        room_target = free_target - target
        room = np.maximum(room_source, room_target)
        room[np.minimum(room_source, room_target) < 0] = too_long
        best = int(room.argmin())
        if room[best] == too_long:
            return row


def plan_at_most(lengths: np.ndarray, shape: RowShape, num_rows: int) -> list[list[int]]:
    """Plans rows for the first pairs, as many pairs as `num_rows` rows have room for."""
    # Start with the pairs that would fit without any padding, and drop the last ones until they do.
    capacity = num_rows * np.array([shape.source_len, shape.target_len])
    num_pairs = int((lengths.cumsum(axis=0) <= capacity).all(axis=1).sum())
    while True:
        rows = plan_rows(lengths[:num_pairs], shape)
        if len(rows) <= num_rows:
            return rows
        num_pairs -= max(1, num_pairs * (len(rows) - num_rows) // len(rows))


def fill(rows: Sequence[Sequence[Example]], shape: RowShape) -> NestedMap:
    """Returns the features and labels of rows, as above: int32 [rows, L]; float32 weights."""
    examples = list(itertools.chain.from_iterable(rows))
    sizes = np.array([len(row) for row in rows], np.int64)
    source = side([example.source_ids for example in examples], sizes, shape.source_len)
    target = side([example.target_ids for example in examples], sizes, shape.target_len)
    labels, segment_ids, positions = target
    is_token = segment_ids > 0  # Segments count from 1; 0 is padding.

    # The decoder's input: the labels shifted right, with BOS at the start of each segment.
    target_ids = np.roll(labels, 1, axis=1)
    target_ids[positions == 0] = BOS_ID
    target_ids[~is_token] = PAD_ID

    return NestedMap(
        features=NestedMap(
            zip(SOURCE, source, strict=True),
            target_ids=target_ids,
            target_segment_ids=segment_ids,
            target_positions=positions,
        ),
        labels=NestedMap(target_labels=labels, target_weights=is_token.astype(np.float32)),
    )


def side(segments: Sequence[np.ndarray], sizes: np.ndarray, length: int) -> np.ndarray:
    """Returns ids, segment ids and positions of one side of some rows, int32 [3, rows, L].

    `segments` has the ids of the pairs' sides, int32 [n] each. Row i contains the next sizes[i] of
    them, which have at most L tokens together.
    """
    # For each segment: its length, the index of its first token among all tokens, and its row.
    lengths = np.array([len(ids) for ids in segments], np.int64)
    starts = np.cumsum(lengths) - lengths
    rows = np.repeat(np.arange(len(sizes)), sizes)

    # The first segment of its row, and from that its number and its column in the row.
    firsts = (np.cumsum(sizes) - sizes)[rows]
    numbers = np.arange(len(segments)) - firsts + 1
    columns = starts - starts[firsts]

    # For each token: its index, its position in the segment, and its place in the flattened rows.
    tokens = np.arange(lengths.sum())
    positions = tokens - np.repeat(starts, lengths)
    places = np.repeat(rows * length + columns, lengths) + positions

    flat = np.zeros((3, len(sizes) * length), np.int32)
    flat[0, places] = np.concatenate([np.empty(0, np.int32), *segments])
    flat[1, places] = np.repeat(numbers, lengths)
    flat[2, places] = positions
    return flat.reshape(3, len(sizes), length)


def batch_specs(batch_size: int, shape: RowShape) -> NestedMap:
    """Returns the TensorSpecs of a batch from `fill`; all dims are BL."""
    return fill([], shape).Transform(
        lambda array: TensorSpec((batch_size, array.shape[1]), array.dtype.name, "BL")
    )


def truncate(ids: np.ndarray, length: int) -> np.ndarray:
    """Returns ids [n] cut to a length; EOS is last even if they are cut."""
    if len(ids) <= length:
        return ids
    return np.concatenate([ids[: length - 1], np.array([EOS_ID], ids.dtype)])
