"""The batches of an evaluation: every example once.

All processes must make equally many batches of the same shapes, which depend on all lengths. So
every process reads the lengths, which take 4 MB for a hundred languages of 10,000 examples; but it
packs and reads only the examples of its own rows. Examples longer than a row are truncated, so that
each of them counts, and empty rows fill up a batch that lacks examples.

With PACKED rows, n processes pack bundles of n examples of similar lengths. A bundle is as long, on
each side, as its longest example. All processes make the same plan of these few rows, and process p
fills it with the p-th example of every bundle. For one process, a bundle is an example.

With BUCKETED rows there is one bucket for the full row lengths, one for their halves and one for
their quarters, as far as they divide evenly. A pair goes into the shortest bucket that holds both
of its sides, and a batch of half the length has twice the rows. So an evaluation compiles at most
three programs, and a pair costs at most twice its own tokens. SINGLE rows have one bucket.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.input.packing import Rows, RowShape
from lingvo_gshard.input.records import RecordSource

_POOL_BUNDLES = 2048
_BUCKET_SCALES = (4, 2, 1)

# The lengths of a batch's rows, and the indices of the examples in each of this process's rows.
_Plan = tuple[RowShape, list[list[int]]]


class OnePassBatches:
    """Batches by index. Batches are planned when they are first needed."""

    def __init__(
        self,
        source: RecordSource,
        params: hyperparams.Params,
        shape: RowShape,
        process_index: int,
        num_processes: int,
    ) -> None:
        """`source` holds the records of all languages; the rest is as in TranslationInput."""
        self._source, self._params, self._shape = source, params, shape
        self._process_index, self._num_processes = process_index, num_processes
        self._order = np.arange(len(source))
        if params.shuffle:
            self._order = np.random.default_rng(params.seed).permutation(len(source))
        self._upcoming = self._plan_packed() if params.rows is Rows.PACKED else self._plan_buckets()
        self._plans: list[_Plan] = []

    def __len__(self) -> int:
        """An upper bound: packed rows hold several examples, and each bucket fills up a batch."""
        return -(-len(self._source) // self._params.batch_size) + len(_BUCKET_SCALES)

    def __getitem__(self, index: int) -> NestedMap | None:
        """This process's rows of batch `index`; None, which Grain skips, after the last batch."""
        missing = index + 1 - len(self._plans)
        self._plans += itertools.islice(self._upcoming, max(0, missing))
        if index >= len(self._plans):
            return None
        shape, rows = self._plans[index]
        rows = rows + [[]] * (self._num_rows(shape) - len(rows))
        numbers = np.array([number for row in rows for number in row], np.int64)
        examples = map(shape.truncate, self._source.read(numbers))
        return packing.fill([[next(examples) for _ in row] for row in rows], shape)

    def _num_rows(self, shape: RowShape) -> int:
        """The number of this process's rows in a batch; of shorter rows there are more."""
        scale = self._shape.source_len // shape.source_len
        return self._params.batch_size * scale // self._num_processes

    def _plan_packed(self) -> Iterator[_Plan]:
        starts = range(0, len(self._order), _POOL_BUNDLES * self._num_processes)
        rows = itertools.chain.from_iterable(map(self._pack_pool, starts))
        while of_batch := list(itertools.islice(rows, self._num_rows(self._shape))):
            yield self._shape, of_batch

    def _pack_pool(self, start: int) -> list[list[int]]:
        """Packs the bundles of a pool of adjacent examples; returns this process's rows."""
        pool = self._order[start : start + _POOL_BUNDLES * self._num_processes]
        longest = [self._shape.source_len, self._shape.target_len]
        lengths = np.minimum(self._source.lengths[pool], longest)
        bundles = _bundles(lengths, self._num_processes)
        with_none = np.append(lengths, [[0, 0]], axis=0)  # At index -1.
        rows = packing.plan_rows(with_none[bundles].max(axis=1), self._shape)
        if self._params.shuffle:
            np.random.default_rng([self._params.seed, start]).shuffle(rows)
        else:
            rows.sort()
        own = bundles[:, self._process_index]
        return [[pool[i] for i in own[row] if i >= 0] for row in rows]

    def _plan_buckets(self) -> Iterator[_Plan]:
        batches = []
        for shape, members in self._buckets():
            size = self._num_rows(shape)
            for start in range(0, len(members), size * self._num_processes):
                first = start + self._process_index * size
                batches.append((shape, members[first : first + size]))
        if self._params.shuffle:  # So that the first batches already have all lengths.
            np.random.default_rng(self._params.seed).shuffle(batches)
        for shape, members in batches:
            yield shape, [[member] for member in members.tolist()]

    def _buckets(self) -> Iterator[tuple[RowShape, np.ndarray]]:
        """Deals all examples out to rows of several lengths by the longer of their two sides."""
        source_len, target_len = self._shape.source_len, self._shape.target_len
        scales, rest = [1], self._order
        if self._params.rows is Rows.BUCKETED:
            scales = [n for n in _BUCKET_SCALES if source_len % n == target_len % n == 0]
        for scale in scales:
            shape = RowShape(source_len // scale, target_len // scale)
            fits = (self._source.lengths[rest] <= [shape.source_len, shape.target_len]).all(axis=1)
            # Examples that fit no bucket are truncated to the longest one.
            yield shape, rest[fits | (scale == 1)]
            rest = rest[~fits]


def _bundles(lengths: np.ndarray, size: int) -> np.ndarray:
    """Groups examples of int [n, 2] lengths by similar lengths: int [n / size, size] indices.

    An index of -1 is one that the last bundle lacks. Bundles are ordered by first examples.
    """
    num_bundles = -(-len(lengths) // size)
    by_source = np.argsort(lengths[:, 0], kind="stable")
    # Each strip of similar source lengths is sorted by target length.
    strip = np.arange(len(lengths)) // (size * math.isqrt(num_bundles))
    order = by_source[np.lexsort((lengths[by_source, 1], strip))]
    bundles = np.pad(order, (0, -len(order) % size), constant_values=-1).reshape(-1, size)
    return bundles[np.argsort(bundles[:, 0])]
