import itertools

import numpy as np
import pytest

from data_prep import shards
from data_prep.text_chunks import Chunk


class _Listed(Chunk):
    """A chunk of consecutive numbers from its start; the multiples of 3 are not kept."""

    def examples(self):
        return iter(range(self.start, self.start + self.num_examples))

    def is_kept(self):
        return np.arange(self.start, self.start + self.num_examples) % 3 != 0


def _chunks(*cuts):
    bounds = itertools.pairwise(cuts)
    return [_Listed("train", "de", None, high - low, low) for low, high in bounds]


@pytest.mark.parametrize("cuts", [(0, 35), (0, 10, 20, 30, 35), (0, 1, 2, 17, 31, 35), (0, 25, 35)])
@pytest.mark.parametrize("pairs_per_shard", [5, 14, 1000])
def test_shards_do_not_depend_on_where_chunks_are_cut(cuts, pairs_per_shard):
    members = [*_chunks(*cuts), *_chunks(40, 52)]  # Another source begins its own block.
    sizes = shards.block_sizes(members, 10)
    made = shards.divide(members, sizes, 10, pairs_per_shard)
    # The definition, literally: blocks of ten numbers, grouped as long as they fit.
    numbers = [*range(35), *range(40, 52)]
    expected = []
    for _, block in itertools.groupby(numbers, lambda i: i // 10):
        kept = [i for i in block if i % 3]
        if not expected or len(expected[-1]) + len(kept) > pairs_per_shard:
            expected.append([])
        expected[-1] += kept
    assert [list(shard.examples()) for shard in made] == expected


def test_a_shard_opens_only_its_chunks():
    members = _chunks(0, 10, 20, 30, 40)
    made = shards.divide(members, shards.block_sizes(members, 10), 10, 14)
    assert [[chunk.start for chunk in shard.chunks] for shard in made] == [[0, 10], [20, 30]]
