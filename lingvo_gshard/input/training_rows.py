"""The endless batches of training: batch s depends only on the data, the seed and s.

The rows of a batch come from V lanes, B/V rows from each. A lane is a sequence of pools of R rows.
Pool k, counted over all lanes, has the examples that the mixture gives from position k*P to
(k+1)*P, packed into R rows. P is chosen so that they fill the rows. Examples that do not fit are
skipped (they return when their language starts over), and any room left is padding.

So the rows of batch s follow from s by counting, whatever happened before. Each of n processes owns
V/n lanes, and no two processes read the same examples. V is gcd(B, 8) if n divides that; otherwise
V is n, and the batches depend on n.
"""

import functools
import math
import sys

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.input.batching import Batching
from lingvo_gshard.input.mixture import Mixture
from lingvo_gshard.input.packing import Rows

_NUM_LANES = 8
# The larger a pool, the likelier some pair fits into the room that a row has left.
_MIN_POOL_ROWS = 512
_PROBED_EXAMPLES = 2000
# Pools differ, so draw more examples than the probe suggests: empty rows would be padding.
_SPARE_DRAWS = 0.03


class TrainingBatches:
    """Batches by index. If they are read in order, each pool is made once."""

    def __init__(self, batching: Batching) -> None:
        """Reads some examples to estimate how many fill a pool.

        Raises ValueError if none of them fits into a row.
        """
        self._params = batching.params
        self._shape = batching.shape
        self._mixture = Mixture(batching.source, batching.params)

        # V lanes, an equal number for each process.
        num_processes = batching.num_processes
        self._num_lanes = math.gcd(self._params.batch_size, _NUM_LANES)
        if self._num_lanes % num_processes != 0:
            self._num_lanes = num_processes
        per_process = self._num_lanes // num_processes
        first_lane = batching.process_index * per_process
        self._lanes = range(first_lane, first_lane + per_process)

        # Pools of R rows and P draws. A pool lasts for a whole number of batches.
        self._lane_rows = self._params.batch_size // self._num_lanes
        self._pool_batches = math.ceil(_MIN_POOL_ROWS / self._lane_rows)
        self._pool_rows = self._pool_batches * self._lane_rows
        self._pool_draws = self._draws_for(self._pool_rows)
        # The cache has the last pool of each lane.
        self._pool = functools.lru_cache(per_process)(self._make_pool)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> NestedMap:
        """Returns this process's rows of batch `index`."""
        lanes = [self._rows_of_lane(lane, index) for lane in self._lanes]
        columns = zip(*(lane.Flatten() for lane in lanes), strict=True)
        return lanes[0].Pack(np.concatenate(column) for column in columns)

    def _rows_of_lane(self, lane: int, index: int) -> NestedMap:
        """Returns a lane's rows of batch `index`."""
        # Lanes begin new pools at different batches, so that the work is spread evenly.
        offset = lane * self._pool_batches // self._num_lanes
        pool_in_lane, batch_in_pool = divmod(index + offset, self._pool_batches)
        pool = self._pool(pool_in_lane * self._num_lanes + lane)

        start = batch_in_pool * self._lane_rows
        end = start + self._lane_rows
        return pool.Transform(lambda array: array[start:end])

    def _make_pool(self, number: int) -> NestedMap:
        """Returns the rows of pool `number`, as a batch of R rows."""
        drawn = self._mixture.read(number * self._pool_draws, (number + 1) * self._pool_draws)
        examples = [example for example in drawn if self._shape.fits(example)]

        # Each row is a list of indices into `examples`.
        if self._params.rows is Rows.PACKED:
            lengths = packing.lengths_of(examples)
            rows = packing.plan_at_most(lengths, self._shape, self._pool_rows)
        else:
            rows = [[i] for i in range(min(len(examples), self._pool_rows))]
        rows += [[]] * (self._pool_rows - len(rows))

        # Packing starts rows with the longest pairs first, so the rows must be reordered. Without a
        # shuffle, empty rows come last.
        if self._params.shuffle:
            np.random.default_rng([self._params.seed, number]).shuffle(rows)
        else:
            rows.sort(key=lambda row: row or [len(examples)])

        examples_of_rows = []
        for row in rows:
            examples_of_rows.append([examples[i] for i in row])
        return packing.fill(examples_of_rows, self._shape)

    def _draws_for(self, num_rows: int) -> int:
        """Returns the number of draws that fill this many rows on average."""
        drawn = self._mixture.read(0, _PROBED_EXAMPLES)
        fitting = [example for example in drawn if self._shape.fits(example)]
        if not fitting:
            raise ValueError(f"none of {len(drawn)} examples fit {self._shape}: lengthen the rows")

        # The number of rows that these draws fill.
        num_filled = float(len(fitting))
        if self._params.rows is Rows.PACKED:  # Assume that the longer side has no padding.
            num_tokens = packing.lengths_of(fitting).sum(axis=0)
            row_lengths = [self._shape.source_len, self._shape.target_len]
            num_filled = float((num_tokens / row_lengths).max())
        return math.ceil((1 + _SPARE_DRAWS) * len(drawn) * num_rows / num_filled)
