"""The division of examples into files of records.

A block is a fixed number of consecutive cleaned examples of a source, only some of which are kept.
A file has whole blocks, so it does not depend on the spans and chunks of earlier tasks.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from data_prep.text_chunks import Chunk
from data_prep.tsv import Example


@dataclasses.dataclass(frozen=True)
class Shard:
    """The kept examples at some positions of a language's split, which are in these chunks."""

    chunks: Sequence[Chunk]
    positions: range

    def examples(self) -> Iterator[Example]:
        """Yields the examples in order."""
        for chunk in self.chunks:
            yield from chunk.kept_examples(self.positions)


def block_sizes(chunks: Sequence[Chunk], pairs_per_block: int) -> collections.Counter[int]:
    """Counts the kept examples of each block, by the block's number, in some chunks."""
    sizes: collections.Counter[int] = collections.Counter()
    for chunk in chunks:
        # A chunk may begin and end inside a block.
        block_of_pair = (chunk.start + np.arange(chunk.num_examples)) // pairs_per_block
        first_block = int(block_of_pair[0])
        counts = np.bincount(block_of_pair - first_block, weights=chunk.is_kept()).astype(int)
        for block, number in enumerate(counts.tolist(), start=first_block):
            sizes[block] += number
    return sizes


def divide(
    chunks: Sequence[Chunk], sizes: Mapping[int, int], pairs_per_block: int, pairs_per_shard: int
) -> list[Shard]:
    """Divides the kept examples of a language's split into shards, by its blocks' `sizes`.

    A shard is one block, or several blocks with at most `pairs_per_shard` kept examples together.
    """
    # The positions at which shards begin; a block that does not fit begins the next shard.
    bounds: list[int] = []
    shard_size = 0
    for block, number in sorted(sizes.items()):
        if not bounds or shard_size + number > pairs_per_shard:
            bounds.append(block * pairs_per_block)
            shard_size = 0
        shard_size += number
    bounds.append(chunks[-1].start + chunks[-1].num_examples)

    # From the chunk in which a shard begins to the last one that begins before its end.
    chunk_starts = [chunk.start for chunk in chunks]
    shards = []
    for low, high in itertools.pairwise(bounds):
        first = bisect.bisect_right(chunk_starts, low) - 1
        end = bisect.bisect_left(chunk_starts, high)
        shards.append(Shard(chunks[first:end], range(low, high)))
    return shards
