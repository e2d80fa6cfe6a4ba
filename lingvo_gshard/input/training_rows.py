"""The endless batches of training: batch s depends on the data, the seed and s alone.

The rows of a batch come from V lanes, B/V rows from each. A lane is a sequence of pools of R rows.
Pool k, counted over all lanes, holds the examples that the mixture gives from position k*P to
(k+1)*P, packed into R rows. P is chosen so that they fill the rows. Examples that find no room are
skipped (they come again when their language starts over), and room that is left is padding.

So the rows of batch s follow from s by counting, however the run got there. Each of n processes
owns V/n lanes, and no two processes read the same examples. V is gcd(B, 8), or else n, if n does
not divide that; then the batches depend on n.
"""

import functools
import math
import sys

import numpy as np

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.input.mixture import Mixture
from lingvo_gshard.input.packing import Rows, RowShape
from lingvo_gshard.input.records import RecordSource

_NUM_LANES = 8
# In a larger pool it is likelier that some pair fits the room that a row has left.
_MIN_POOL_ROWS = 512
_PROBED_EXAMPLES = 2000
# Pools differ, so draw more than the probe says that a pool needs: rows left empty are padding.
_SPARE_DRAWS = 0.03


class TrainingBatches:
    """Batches by index. If they are read in order, each pool is made once."""

    def __init__(
        self,
        source: RecordSource,
        params: hyperparams.Params,
        shape: RowShape,
        process_index: int,
        num_processes: int,
    ) -> None:
        """Reads some examples to estimate how many fill a pool; ValueError if none fits a row."""
        self._mixture, self._params, self._shape = Mixture(source, params), params, shape
        num_lanes = math.gcd(params.batch_size, _NUM_LANES)
        self._num_lanes = num_lanes if num_lanes % num_processes == 0 else num_processes
        per_process = self._num_lanes // num_processes
        self._lanes = range(process_index * per_process, (process_index + 1) * per_process)
        self._lane_rows = params.batch_size // self._num_lanes
        self._pool_batches = math.ceil(_MIN_POOL_ROWS / self._lane_rows)
        self._pool_rows = self._pool_batches * self._lane_rows
        self._pool_draws = self._draws_for(self._pool_rows)
        self._pool = functools.lru_cache(per_process)(self._make_pool)  # The last one of each lane.

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> NestedMap:
        """This process's rows of batch `index`."""
        parts = []
        for lane in self._lanes:
            # Lanes begin a new pool in turn, not all in the same batch.
            offset = lane * self._pool_batches // self._num_lanes
            pool_index, batch_in_pool = divmod(index + offset, self._pool_batches)
            start = batch_in_pool * self._lane_rows
            pool = self._pool(pool_index * self._num_lanes + lane)
            rows = slice(start, start + self._lane_rows)
            parts.append([array[rows] for array in pool.Flatten()])
        return pool.Pack(map(np.concatenate, zip(*parts, strict=True)))

    def _make_pool(self, number: int) -> NestedMap:
        drawn = self._mixture.read(number * self._pool_draws, (number + 1) * self._pool_draws)
        examples = [example for example in drawn if self._shape.fits(example)]
        if self._params.rows is Rows.PACKED:
            rows = packing.plan_at_most(packing.lengths_of(examples), self._shape, self._pool_rows)
        else:
            rows = [[i] for i in range(min(len(examples), self._pool_rows))]
        rows += [[]] * (self._pool_rows - len(rows))
        # Packing starts rows with the longest pairs first, so the rows need another order.
        if self._params.shuffle:
            np.random.default_rng([self._params.seed, number]).shuffle(rows)
        else:
            rows.sort(key=lambda row: row or [len(examples)])
        return packing.fill([[examples[i] for i in row] for row in rows], self._shape)

    def _draws_for(self, num_rows: int) -> int:
        """The number of draws that fill this many rows on average."""
        drawn = self._mixture.read(0, _PROBED_EXAMPLES)
        fitting = [example for example in drawn if self._shape.fits(example)]
        if not fitting:
            raise ValueError(f"none of {len(drawn)} examples fits {self._shape}: lengthen the rows")
        needed = float(len(fitting))
        if self._params.rows is Rows.PACKED:  # Assume that the longer side has no padding.
            tokens = packing.lengths_of(fitting).sum(axis=0)
            needed = float((tokens / [self._shape.source_len, self._shape.target_len]).max())
        return math.ceil((1 + _SPARE_DRAWS) * len(drawn) * num_rows / needed)
