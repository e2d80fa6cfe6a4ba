"""Raw text: the dev and test sentences of a prepared folder, and batches of lines to translate."""

import dataclasses
import gzip
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing

# A program is compiled for each length; at most half of a row beyond the first bucket is padding.
_BUCKETS = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """Sources of similar length, one in each row.

    The features are source_ids, source_segment_ids (1 for tokens, 0 for padding) and
    source_positions, all int32 [B, L].
    """

    features: NestedMap
    indices: Sequence[int]  # Those of the rows' sources; further rows are empty.


def eval_text(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Yields the raw (source, English) pairs of a file of dev or test text, in order."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            source, english = line.rstrip("\n").split("\t")
            yield source, english


def lengths(max_len: int) -> tuple[int, ...]:
    """The row lengths for sentences of at most `max_len` pieces, shortest first."""
    if max_len < 1:
        raise ValueError(f"decode.max_source_len must be 1 or more, got {max_len}.")
    return tuple(sorted({min(bucket, max_len) for bucket in _BUCKETS} | {max_len}))


def decode_batches(
    sources: Sequence[np.ndarray],
    batch_size: int,
    row_lengths: Sequence[int],
    num_batches: Callable[[list[int]], list[int]] = list,
) -> Iterator[DecodeBatch]:
    """Yields every source, given as int32 ids, once, shortest first.

    All rows of a batch have the same length, the shortest that fits. `row_lengths` ascend, and no
    source is longer than the last. `num_batches` maps the numbers of batches of each length to
    those to yield; the additional ones have empty rows only.
    """
    shortest_first = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    batches: list[list[list[int]]] = []
    for shorter, length in itertools.pairwise((0, *row_lengths)):
        members = [i for i in shortest_first if shorter < len(sources[i]) <= length]
        starts = range(0, len(members), batch_size)
        batches.append([members[start : start + batch_size] for start in starts])
    counts = num_batches([len(of_length) for of_length in batches])
    names = ("source_ids", "source_segment_ids", "source_positions")
    for length, count, of_length in zip(row_lengths, counts, batches, strict=True):
        for indices in itertools.chain(of_length, [[]] * (count - len(of_length))):
            is_used = np.arange(batch_size) < len(indices)
            arrays = packing.side([sources[i] for i in indices], is_used, length)
            yield DecodeBatch(NestedMap(zip(names, arrays, strict=True)), indices)
