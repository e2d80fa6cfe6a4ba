"""Which pairs are written to one file of records.

A block is a fixed number of a source's cleaned pairs, of which some are kept. A file holds whole
blocks, so that it does not depend on the spans and chunks that tasks have read and written.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from data_prep.chunks import Chunk
from data_prep.tsv import Pair


@dataclasses.dataclass(frozen=True)
class Shard:
    """The kept pairs of one file; the first is the `first` one of those of its chunks."""

    chunks: Sequence[Chunk]
    first: int
    num_pairs: int

    def pairs(self) -> Iterator[Pair]:
        """Yields the pairs in order."""
        kept = itertools.chain.from_iterable(chunk.kept_pairs() for chunk in self.chunks)
        return itertools.islice(kept, self.first, self.first + self.num_pairs)


def divide(
    members: Sequence[Chunk],
    block_sizes: Sequence[Sequence[int]],
    pairs_per_block: int,
    pairs_per_shard: int,
) -> list[Shard]:
    """Divides the kept pairs of a split of a language into shards.

    `block_sizes` are those of Chunk.block_sizes for each of the chunks, of which there are
    `pairs_per_block` pairs before any is dropped. A shard is one block, or several of together at
    most `pairs_per_shard` kept pairs.
    """
    starts = list(itertools.accumulate(map(sum, block_sizes), initial=0))
    shards, first = [], 0
    for size in _sizes(_whole_blocks(members, block_sizes, pairs_per_block), pairs_per_shard):
        low = bisect.bisect_right(starts, first) - 1
        high = bisect.bisect_left(starts, first + size, hi=len(members))
        shards.append(Shard(members[low:high], first - starts[low], size))
        first += size
    return shards


def _whole_blocks(
    members: Sequence[Chunk], block_sizes: Sequence[Sequence[int]], pairs_per_block: int
) -> list[int]:
    """Returns the sizes of the blocks, of which those between two chunks are in both."""
    whole: list[int] = []
    for chunk, sizes in zip(members, block_sizes, strict=True):
        if chunk.start % pairs_per_block:
            whole[-1] += sizes[0]
            sizes = sizes[1:]
        whole += sizes
    return whole


def _sizes(blocks: Iterable[int], pairs_per_shard: int) -> list[int]:
    sizes: list[int] = []
    for number in blocks:
        if not sizes or sizes[-1] + number > pairs_per_shard:
            sizes.append(0)
        sizes[-1] += number
    return sizes
