"""The batches of an evaluation: every example once.

The example lengths, which all processes know, determine which examples form which row. Each
process then reads only the examples of its own rows. Examples longer than a row are truncated, so
that each of them counts, and empty rows fill up a batch that lacks examples.

With BUCKETED rows there is one bucket for the full row lengths, one for their halves and one for
their quarters, as far as they divide evenly. A pair goes into the shortest bucket that holds both
of its sides, and a batch of half the length has twice the rows. So an evaluation compiles at most
three programs, and a pair costs at most twice its own tokens.
"""

import itertools
from collections.abc import Iterator

import grain.python as grain
import numpy as np

from lingvo_gshard.core import hyperparams
from lingvo_gshard.input import packing
from lingvo_gshard.input.packing import Arrays, Rows, RowShape
from lingvo_gshard.input.records import RecordSource

_POOL_EXAMPLES = 2048
_BUCKET_SCALES = (4, 2, 1)


# The lengths of a batch's rows, and the record indices in each of them.
_Plan = tuple[RowShape, list[list[int]]]


class OnePassBatches(grain.MapDataset[Arrays]):
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
        super().__init__()
        self._source, self._params, self._shape = source, params, shape
        self._process_index, self._num_processes = process_index, num_processes
        self._order = np.arange(len(source))
        if params.shuffle:
            self._order = np.random.default_rng(params.seed).permutation(len(source))
        bucketed = params.rows is Rows.BUCKETED
        self._upcoming = self._plan_buckets() if bucketed else self._plan_rows()
        self._plans: list[_Plan] = []

    def __len__(self) -> int:
        """An upper bound: packed rows hold several examples, and each bucket fills up a batch."""
        return -(-len(self._source) // self._params.batch_size) + len(_BUCKET_SCALES)

    def __getitem__(self, index: int) -> Arrays | None:  # type: ignore[override]
        """This process's rows of batch `index`; None, which Grain skips, after the last batch."""
        missing = index + 1 - len(self._plans)
        self._plans += itertools.islice(self._upcoming, max(0, missing))
        if index >= len(self._plans):
            return None
        shape, rows = self._plans[index]
        # Empty rows fill up a batch; one with shorter rows has more of them.
        num_rows = self._params.batch_size * (self._shape.source_len // shape.source_len)
        rows = rows + [[]] * (num_rows - len(rows))
        size = num_rows // self._num_processes
        rows = rows[self._process_index * size : (self._process_index + 1) * size]
        numbers = np.array([number for row in rows for number in row], np.int64)
        examples = [shape.truncate(example) for example in self._source.read(numbers)]
        position = itertools.count()
        return packing.fill([[next(position) for _ in row] for row in rows], examples, shape)

    def _plan_rows(self) -> Iterator[_Plan]:
        """Packs pools of adjacent examples, or gives each example a row of its own."""
        waiting: list[list[int]] = []
        for start in range(0, len(self._order), _POOL_EXAMPLES):
            pool = self._order[start : start + _POOL_EXAMPLES]
            if self._params.rows is Rows.PACKED:
                longest = [self._shape.source_len, self._shape.target_len]
                lengths = np.minimum(self._source.lengths[pool], longest)
                rows = packing.plan_rows(lengths, self._shape)
            else:
                rows = [[index] for index in range(len(pool))]
            if self._params.shuffle:
                np.random.default_rng([self._params.seed, start]).shuffle(rows)
            else:
                rows.sort()
            waiting += [pool[row].tolist() for row in rows]
            while len(waiting) >= self._params.batch_size:
                yield self._shape, waiting[: self._params.batch_size]
                del waiting[: self._params.batch_size]
        if waiting:
            yield self._shape, waiting

    def _plan_buckets(self) -> Iterator[_Plan]:
        """Deals all examples out to buckets by the longer of their two sides."""
        sides = (self._shape.source_len, self._shape.target_len)
        scales = [n for n in _BUCKET_SCALES if sides[0] % n == sides[1] % n == 0]
        lengths = self._source.lengths[self._order]
        bucket_of_side = [
            np.searchsorted([length // n for n in scales], lengths[:, side])
            for side, length in enumerate(sides)
        ]
        # Examples that fit no bucket are truncated to the longest one.
        bucket_of = np.minimum(np.maximum(*bucket_of_side), len(scales) - 1)
        batches: list[_Plan] = []
        for bucket, scale in enumerate(scales):
            shape = RowShape(sides[0] // scale, sides[1] // scale)
            rows = [[member] for member in self._order[bucket_of == bucket].tolist()]
            size = self._params.batch_size * scale
            batches += [(shape, rows[i : i + size]) for i in range(0, len(rows), size)]
        if self._params.shuffle:  # So that the first batches already have all lengths.
            order = np.random.default_rng(self._params.seed).permutation(len(batches))
            batches = [batches[i] for i in order]
        yield from batches
