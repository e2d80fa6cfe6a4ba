"""Raw text: the dev and test sentences of a prepared folder, and batches of lines to translate."""

import dataclasses
import gzip
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import example_codec, packing
from lingvo_gshard.input.tokenizer import Tokenizer

# A program is compiled for each length; at most half of a row beyond the first bucket is padding.
_BUCKETS = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """Source sentences of similar length, one in each row.

    The features are source_ids, source_segment_ids (1 for tokens, 0 for padding) and
    source_positions, all int32 [B, L], where L is one of the buckets.
    """

    features: NestedMap
    line_indices: np.ndarray  # int32 [B], the index of each row's line, -1 in empty rows.


def eval_text(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Yields the raw (source, English) pairs of a file of dev or test text, in order."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            source, english = line.rstrip("\n").split("\t")
            yield source, english


def lengths(max_len: int) -> tuple[int, ...]:
    """The row lengths for sentences of at most `max_len` pieces, shortest first."""
    return tuple(sorted({min(bucket, max_len) for bucket in _BUCKETS} | {max_len}))


def decode_batches(
    lines: Sequence[str],
    tokenizer: Tokenizer,
    batch_size: int,
    row_lengths: Sequence[int],
    num_batches: Callable[[list[int]], list[int]] = list,
) -> Iterator[DecodeBatch]:
    """Yields every line once, shortest first.

    All rows of a batch have the same length, the shortest that fits. `row_lengths` ascend; longer
    lines are truncated, with a warning. `num_batches` maps the numbers of batches of each length to
    those to yield; the additional ones have empty rows only.
    """
    if min(batch_size, *row_lengths) < 1:
        raise ValueError(
            f"batch_size {batch_size}, row lengths {tuple(row_lengths)}: expected at least 1"
        )
    encoded = _encode(lines, tokenizer, row_lengths[-1])
    sizes = np.array([len(ids) for ids in encoded], np.int64)
    shortest_first = np.argsort(sizes, kind="stable")
    batches: list[list[list[int]]] = []
    ends = np.searchsorted(sizes[shortest_first], row_lengths[:-1], side="right")
    for members in np.split(shortest_first, ends):
        starts = range(0, len(members), batch_size)
        batches.append([members[start : start + batch_size].tolist() for start in starts])
    counts = num_batches([len(of_length) for of_length in batches])
    for length, count, of_length in zip(row_lengths, counts, batches, strict=True):
        for rows in itertools.chain(of_length, [[]] * (count - len(of_length))):
            yield _batch(rows, encoded, batch_size, length)


def _encode(lines: Sequence[str], tokenizer: Tokenizer, max_len: int) -> list[list[int]]:
    encoded = tokenizer.encode_lines(lines)
    too_long = [index for index, ids in enumerate(encoded) if len(ids) > max_len]
    for index in too_long:
        encoded[index] = [*encoded[index][: max_len - 1], example_codec.EOS_ID]
    if too_long:
        counts = f"{len(too_long)} of {len(lines)} lines to {max_len} pieces"
        logging.warning("Truncated %s, the first is line %d", counts, too_long[0] + 1)
    return encoded


def _batch(
    rows: Sequence[int], encoded: Sequence[Sequence[int]], batch_size: int, length: int
) -> DecodeBatch:
    line_indices = np.full(batch_size, -1, np.int32)
    line_indices[: len(rows)] = rows
    members = [np.array(encoded[index], np.int32) for index in rows]
    ids, segments, positions = packing.side(members, line_indices >= 0, length)
    features = NestedMap(source_ids=ids, source_segment_ids=segments, source_positions=positions)
    return DecodeBatch(features, line_indices)
