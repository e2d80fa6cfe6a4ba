"""Which pairs are written to one file of records.

A block is a fixed number of cleaned pairs of a source, of which some are kept. A file holds whole
blocks, so that it does not depend on the spans and chunks that tasks have read and written.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from data_prep.chunks import Chunk
from data_prep.tsv import Pair


@dataclasses.dataclass(frozen=True)
class Shard:
    """The kept pairs at some positions of a split of a language, which lie in these chunks."""

    chunks: Sequence[Chunk]
    positions: range

    def pairs(self) -> Iterator[Pair]:
        """Yields the pairs in order."""
        for chunk in self.chunks:
            yield from chunk.kept_pairs(self.positions)


def block_sizes(members: Sequence[Chunk], pairs_per_block: int) -> collections.Counter[int]:
    """Counts the kept pairs of each block, by its number, in some chunks."""
    sizes: collections.Counter[int] = collections.Counter()
    for chunk in members:
        blocks = (chunk.start + np.arange(chunk.num_pairs)) // pairs_per_block
        counts = np.bincount(blocks - blocks[0], weights=chunk.is_kept()).astype(int).tolist()
        sizes.update(dict(enumerate(counts, start=int(blocks[0]))))
    return sizes


def divide(
    members: Sequence[Chunk], sizes: Mapping[int, int], pairs_per_block: int, pairs_per_shard: int
) -> list[Shard]:
    """Divides the kept pairs of a split of a language into shards, given the `sizes` of its blocks.

    A shard is one block, or several of together at most `pairs_per_shard` kept pairs.
    """
    bounds, size = list[int](), 0
    for block, number in sorted(sizes.items()):
        if not bounds or size + number > pairs_per_shard:
            bounds.append(block * pairs_per_block)
            size = 0
        size += number
    starts = [chunk.start for chunk in members]
    bounds.append(starts[-1] + members[-1].num_pairs)
    shards = []
    for low, high in itertools.pairwise(bounds):
        first, last = bisect.bisect_right(starts, low) - 1, bisect.bisect_left(starts, high)
        shards.append(Shard(members[first:last], range(low, high)))
    return shards
