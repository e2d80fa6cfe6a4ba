"""The endless batches of training: batch s is a function of the data, the seed and s alone.

A batch's rows come from V lanes, B/V from each. A lane is a sequence of pools of R rows. Pool k of
all lanes together is what the mixture gives from position k*P to (k+1)*P, in R rows: P is chosen
so that it fills them, what finds no room in them is passed over (it comes again, elsewhere, when
its language is used up), and what is left empty is padding. So the row in which batch s of a lane
starts is a matter of counting, however the run came to s; and of n processes, each with V/n of the
lanes, none reads what another does.
"""

import dataclasses
import math
import sys

import grain.python as grain
import numpy as np

from lingvo_gshard.input import packing
from lingvo_gshard.input.mixture import Mixture

# Of a pool, at least: among more pairs there is oftener one that fits what a row has left.
_MIN_POOL_ROWS = 512
_PROBED_EXAMPLES = 2000
# More draws than the probe says that a pool needs: pools differ, and rows left empty are padding.
_SPARE_DRAWS = 0.03


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """How examples become batches.

    Attributes:
        batch_size: B, rows of all processes together.
        shape: of a row.
        rows: PACKED or SINGLE.
        shuffle: whether a pool's rows are.
        num_lanes: V, a divisor of B.
        lanes: those of this process.
        seed: of the shuffle.
    """

    batch_size: int
    shape: packing.RowShape
    rows: packing.Rows
    shuffle: bool
    num_lanes: int
    lanes: range
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_lanes < 1 or self.batch_size % self.num_lanes:
            raise ValueError(
                f"batch_size {self.batch_size}, num_lanes {self.num_lanes}: expected at least 1 "
                "row, and a divisor of it"
            )
        if self.rows is packing.Rows.BUCKETED:
            raise ValueError("rows BUCKETED with repeat: all batches of training have one shape")

    @property
    def lane_rows(self) -> int:
        """Rows of a lane in a batch."""
        return self.batch_size // self.num_lanes

    @property
    def pool_batches(self) -> int:
        """Batches that a pool serves."""
        return math.ceil(_MIN_POOL_ROWS / self.lane_rows)


@dataclasses.dataclass(frozen=True)
class RowBatch:
    """The arrays of `packing.fill`, and the examples that were too long for a row so far."""

    arrays: dict[str, np.ndarray]
    num_too_long: int


class TrainingRows(grain.MapDataset[RowBatch]):
    """Batches by their number. Taken in turn, each pool is made once."""

    def __init__(self, mixture: Mixture, config: RowConfig) -> None:
        """Reads some examples to learn how many fill a pool.

        Raises:
            ValueError: none of them fits a row.
        """
        super().__init__()
        self._mixture, self._config = mixture, config
        self._pool_rows = config.pool_batches * config.lane_rows
        self._pool_draws = self._draws_for(self._pool_rows)
        self._pools: dict[int, tuple[int, dict[str, np.ndarray]]] = {}
        self._num_too_long = 0

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> RowBatch:  # type: ignore[override]
        """The rows of batch `index` that are this process's."""
        config = self._config
        parts = []
        for lane in config.lanes:
            # Lanes change pools in turn, not all in the same batch.
            ahead = lane * config.pool_batches // config.num_lanes
            number, place = divmod(index + ahead, config.pool_batches)
            rows = slice(place * config.lane_rows, (place + 1) * config.lane_rows)
            pool = self._pool(lane, number)
            parts.append({name: array[rows] for name, array in pool.items()})
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return RowBatch(arrays, self._num_too_long)

    def _pool(self, lane: int, number: int) -> dict[str, np.ndarray]:
        """A lane's pool; the one that the lane had last is kept."""
        if lane not in self._pools or self._pools[lane][0] != number:
            arrays = self._make_pool(number * self._config.num_lanes + lane)
            self._pools[lane] = (number, arrays)
        return self._pools[lane][1]

    def _make_pool(self, number: int) -> dict[str, np.ndarray]:
        config = self._config
        drawn = self._mixture.read(number * self._pool_draws, (number + 1) * self._pool_draws)
        examples = [example for example in drawn if config.shape.fits(example)]
        self._num_too_long += len(drawn) - len(examples)
        if config.rows is packing.Rows.PACKED:
            rows = packing.plan_at_most(packing.lengths_of(examples), config.shape, self._pool_rows)
        else:
            rows = [[i] for i in range(min(len(examples), self._pool_rows))]
        rows += [[]] * (self._pool_rows - len(rows))
        # Packing opens rows for the longest pairs first: put them in another order.
        if config.shuffle:
            np.random.default_rng([config.seed, number]).shuffle(rows)
        else:
            rows.sort(key=lambda row: row or [len(examples)])
        return packing.fill(rows, examples, config.shape)

    def _draws_for(self, num_rows: int) -> int:
        """The draws that fill so many rows, on average."""
        config = self._config
        drawn = self._mixture.read(0, _PROBED_EXAMPLES)
        fitting = [example for example in drawn if config.shape.fits(example)]
        if not fitting:
            raise ValueError(f"none of {len(drawn)} examples in a row fits {config.shape}")
        needed = float(len(fitting))
        if config.rows is packing.Rows.PACKED:  # With nothing left empty on the longer side.
            tokens = packing.lengths_of(fitting).sum(axis=0)
            needed = float((tokens / [config.shape.source_len, config.shape.target_len]).max())
        return math.ceil((1 + _SPARE_DRAWS) * len(drawn) * num_rows / needed)
