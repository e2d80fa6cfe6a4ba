"""The batches of an evaluation: every example once.

All processes must make equally many batches of the same shapes, which depend on all lengths. So
every process reads the lengths, which take 4 MB for a hundred languages of 10,000 examples, but
packs and reads only the examples of its own rows. Examples longer than a row are truncated, so that
each of them counts, and empty rows complete a batch that lacks examples.

With PACKED rows, n processes pack bundles of n examples of similar lengths. A bundle is as long, on
each side, as its longest example. All processes make the same plan of bundles, and process p fills
it with the p-th example of every bundle. With one process, a bundle is one example.

With BUCKETED rows there is a bucket for the full row lengths, one for their halves and one for
their quarters, if they divide evenly. A pair goes into the shortest bucket that fits both of its
sides, and a batch of half the length has twice the rows. So an evaluation compiles at most three
programs, and a pair costs at most twice its own tokens. SINGLE rows have one bucket.
"""

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.input.batching import Batching
from lingvo_gshard.input.example_codec import Example
from lingvo_gshard.input.packing import Rows, RowShape

_POOL_BUNDLES = 2048
_BUCKET_SCALES = (4, 2, 1)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The row lengths of a batch, and the indices of the examples in this process's rows."""

    shape: RowShape
    rows: list[list[int]]


class OnePassBatches:
    """Batches by index, planned when they are first needed."""

    def __init__(self, batching: Batching) -> None:
        self._source = batching.source
        self._params = batching.params
        self._shape = batching.shape
        self._process_index = batching.process_index
        self._num_processes = batching.num_processes

        # The order in which examples are dealt out to pools or buckets, the same in all processes.
        self._order = np.arange(len(self._source))
        if self._params.shuffle:
            self._order = np.random.default_rng(self._params.seed).permutation(len(self._source))

        # Batches are planned in order, and the plans kept, so that a batch can be made again.
        self._plans: list[_Plan] = []
        self._planning = threading.Lock()  # A thread reads ahead.
        if self._params.rows is Rows.PACKED:
            self._upcoming_plans = self._plan_packed()
        else:
            self._upcoming_plans = self._plan_buckets()

    def __len__(self) -> int:
        """Returns an upper bound: a packed row holds several examples.

        With buckets, each of them may end with a batch that is not full.
        """
        num_batches = math.ceil(len(self._source) / self._params.batch_size)
        return num_batches + len(_BUCKET_SCALES)

    def count_batches(self, limit: int | None) -> int:
        """Returns the number of batches, at most `limit`, and plans as many."""
        with self._planning:
            num_missing = None if limit is None else max(0, limit - len(self._plans))
            self._plans += itertools.islice(self._upcoming_plans, num_missing)
        return len(self._plans) if limit is None else min(limit, len(self._plans))

    def __getitem__(self, index: int) -> NestedMap | None:
        """Returns this process's rows of batch `index`; None, which Grain skips, after the last."""
        with self._planning:
            num_missing = index + 1 - len(self._plans)
            self._plans += itertools.islice(self._upcoming_plans, max(0, num_missing))
        if index >= len(self._plans):
            return None
        plan = self._plans[index]

        # All examples are read at once, since a call opens each file once.
        numbers = np.array(list(itertools.chain.from_iterable(plan.rows)), np.int64)
        remaining = iter(self._source.read(numbers))
        rows: list[list[Example]] = []
        for row in plan.rows:
            examples = itertools.islice(remaining, len(row))
            rows.append([plan.shape.truncate(example) for example in examples])

        # A bucket's last batch may lack examples.
        num_empty = self._num_rows(plan.shape) - len(rows)
        rows += [[]] * num_empty
        return packing.fill(rows, plan.shape)

    def _num_rows(self, shape: RowShape) -> int:
        """Returns this process's number of rows in a batch; it is higher for shorter rows."""
        scale = self._shape.source_len // shape.source_len
        return self._params.batch_size * scale // self._num_processes

    def _plan_packed(self) -> Iterator[_Plan]:
        """Yields the plans of batches of packed rows."""
        pool_size = _POOL_BUNDLES * self._num_processes
        starts = range(0, len(self._order), pool_size)
        rows = itertools.chain.from_iterable(self._pack_pool(start) for start in starts)
        while rows_of_batch := list(itertools.islice(rows, self._num_rows(self._shape))):
            yield _Plan(self._shape, rows_of_batch)

    def _pack_pool(self, start: int) -> list[list[int]]:
        """Packs the bundles of a pool of adjacent examples; returns this process's rows."""
        pool = self._order[start : start + _POOL_BUNDLES * self._num_processes]
        longest = [self._shape.source_len, self._shape.target_len]
        lengths = np.minimum(self._source.lengths[pool], longest)

        # A bundle is as long as its longest example. A missing one, at index -1, has length 0.
        bundles = _bundles(lengths, self._num_processes)
        lengths_or_none = np.append(lengths, [[0, 0]], axis=0)
        bundle_lengths = lengths_or_none[bundles].max(axis=1)
        rows_of_bundles = packing.plan_rows(bundle_lengths, self._shape)

        # All processes shuffle the same way, and each takes its own example of every bundle.
        if self._params.shuffle:
            np.random.default_rng([self._params.seed, start]).shuffle(rows_of_bundles)
        else:
            rows_of_bundles.sort()
        own = bundles[:, self._process_index]
        rows: list[list[int]] = []
        for bundle_indices in rows_of_bundles:
            rows.append([pool[i] for i in own[bundle_indices] if i >= 0])
        return rows

    def _plan_buckets(self) -> Iterator[_Plan]:
        """Yields the plans of batches with one example per row, each batch from one bucket."""
        batches: list[tuple[RowShape, np.ndarray]] = []
        for shape, examples in self._buckets():
            # Process p takes the p-th run of rows of each batch.
            num_rows = self._num_rows(shape)
            for start in range(0, len(examples), num_rows * self._num_processes):
                first = start + self._process_index * num_rows
                batches.append((shape, examples[first : first + num_rows]))

        # Shuffled, the first batches have all lengths, so that all programs compile early.
        if self._params.shuffle:
            np.random.default_rng(self._params.seed).shuffle(batches)
        for shape, examples in batches:
            yield _Plan(shape, [[example] for example in examples.tolist()])

    def _buckets(self) -> Iterator[tuple[RowShape, np.ndarray]]:
        """Yields each bucket's row lengths, and its examples, from short to long rows."""
        source_len = self._shape.source_len
        target_len = self._shape.target_len
        scales = [1]
        if self._params.rows is Rows.BUCKETED:
            # The full, half and quarter lengths, if they divide evenly.
            scales = [n for n in _BUCKET_SCALES if source_len % n == 0 and target_len % n == 0]

        remaining = self._order
        for scale in scales:
            shape = RowShape(source_len // scale, target_len // scale)
            if scale == 1:
                # The last bucket also takes longer examples, which are truncated.
                yield shape, remaining
                return
            lengths = self._source.lengths[remaining]
            fits = (lengths <= [shape.source_len, shape.target_len]).all(axis=1)
            yield shape, remaining[fits]
            remaining = remaining[~fits]


def _bundles(lengths: np.ndarray, size: int) -> np.ndarray:
    """Groups examples of similar lengths, int [n, 2], into bundles of `size`.

    Returns int [n / size, size] indices, with n / size rounded up. Index -1 stands for an example
    that the last bundle lacks. Bundles are in the order of their first examples.
    """
    num_bundles = math.ceil(len(lengths) / size)
    # Sort by source length and then, within strips of similar source lengths, by target length.
    # There are about as many strips as bundles in a strip, so that both sides are equally similar.
    by_source = np.argsort(lengths[:, 0], kind="stable")
    strip = np.arange(len(lengths)) // (size * math.isqrt(num_bundles))
    order = by_source[np.lexsort((lengths[by_source, 1], strip))]

    # Restore the order of the examples, so that without a shuffle the rows follow the data.
    num_lacking = num_bundles * size - len(order)
    bundles = np.pad(order, (0, num_lacking), constant_values=-1).reshape(-1, size)
    return bundles[np.argsort(bundles[:, 0])]
