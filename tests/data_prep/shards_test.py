import itertools

import numpy as np
import pytest

from data_prep import shards
from data_prep.chunks import Chunk


class _Listed(Chunk):
    """A chunk of numbers, of which those divisible by 3 are not kept."""

    def kept_pairs(self):
        numbers = range(int(self.path) + self.start, int(self.path) + self.start + self.num_pairs)
        return (i for i in numbers if i % 3)


def _chunks(source, cuts):
    """The chunks of a source whose numbers begin at `source`, which is cut at `cuts`."""
    bounds = itertools.pairwise(cuts)
    return [_Listed("train", "de", source, high - low, low) for low, high in bounds]


def _block_sizes(chunk):
    numbers = int(chunk.path) + chunk.start + np.arange(chunk.num_pairs)
    return chunk.block_sizes(numbers % 3 != 0, 10)


@pytest.mark.parametrize("cuts", [[0, 35], [0, 10, 20, 30, 35], [0, 1, 2, 17, 31, 35], [0, 25, 35]])
@pytest.mark.parametrize("pairs_per_shard", [5, 14, 1000])
def test_shards_do_not_depend_on_where_chunks_are_cut(cuts, pairs_per_shard):
    members = [*_chunks(0, cuts), *_chunks(100, [0, 12])]
    sizes = [_block_sizes(chunk) for chunk in members]
    made = shards.divide(members, sizes, 10, pairs_per_shard)
    # Literally: blocks of ten numbers, grouped as long as they fit.
    blocks = [range(i, min(i + 10, 35)) for i in range(0, 35, 10)]
    blocks += [range(100, 110), range(110, 112)]
    expected = []
    for block in blocks:
        kept = [i for i in block if i % 3]
        if not expected or len(expected[-1]) + len(kept) > pairs_per_shard:
            expected.append([])
        expected[-1] += kept
    assert [list(shard.pairs()) for shard in made] == expected
    assert all(len(shard.chunks) <= len(members) for shard in made)


def test_a_shard_opens_only_its_chunks():
    members = _chunks(0, [0, 10, 20, 30, 40])
    sizes = [_block_sizes(chunk) for chunk in members]
    made = shards.divide(members, sizes, 10, 14)
    assert [(len(shard.chunks), shard.first, shard.num_pairs) for shard in made] == [
        (2, 0, 13),
        (2, 0, 13),
    ]
