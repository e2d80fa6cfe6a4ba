"""The batches of an evaluation: every example once, the last batch filled up with empty rows.

Examples longer than a row are truncated: each counts. Of several processes each makes all batches
and takes its rows of them; evaluations are small.
"""

import dataclasses
from typing import Any

import grain.python as grain
import numpy as np

from lingvo_gshard.input import packing
from lingvo_gshard.input.mixture import OnePass
from lingvo_gshard.input.training_rows import RowBatch

_POOL_EXAMPLES = 2048


@dataclasses.dataclass(frozen=True)
class OnePassConfig:
    """How examples become batches: `own_rows` are this process's, of `batch_size` in all."""

    batch_size: int
    shape: packing.RowShape
    rows: packing.Rows
    shuffle: bool
    seed: int
    own_rows: slice

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size {self.batch_size}: expected at least 1")


@dataclasses.dataclass(frozen=True)
class _Pool:
    """Rows made of examples that follow each other, and the number of those that were cut."""

    arrays: dict[str, np.ndarray]
    num_rows: int
    num_too_long: int


class OnePassRows(grain.IterDataset[RowBatch]):
    """The batches of one pass as a Grain dataset."""

    def __init__(self, examples: OnePass, config: OnePassConfig) -> None:
        super().__init__()
        self._examples, self._config = examples, config

    def __iter__(self) -> "OnePassIterator":
        return OnePassIterator(self._examples, self._config)


class OnePassIterator(grain.DatasetIterator[RowBatch]):
    """Cuts batches from one pool after the other; a pool made again has the same rows."""

    def __init__(self, examples: OnePass, config: OnePassConfig) -> None:
        super().__init__()
        self._examples, self._config = examples, config
        self._pool: _Pool | None = None
        self._pool_start = self._next_row = self._num_too_long_before_pool = 0

    def get_state(self) -> dict[str, int]:
        """Where the next batch starts; JSON-able."""
        return {
            "pool_start": self._pool_start,
            "next_row": self._next_row,
            "num_too_long_before_pool": self._num_too_long_before_pool,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from what `get_state` returned."""
        self._pool = None
        self._pool_start = state["pool_start"]
        self._next_row = state["next_row"]
        self._num_too_long_before_pool = state["num_too_long_before_pool"]

    def __next__(self) -> RowBatch:
        parts: list[dict[str, np.ndarray]] = []
        missing = self._config.batch_size
        while missing:
            pool = self._current_pool()
            if pool is None:
                break
            rows = slice(self._next_row, min(self._next_row + missing, pool.num_rows))
            parts.append({name: array[rows] for name, array in pool.arrays.items()})
            missing -= rows.stop - rows.start
            self._next_row = rows.stop
        if not parts:
            raise StopIteration
        empty_rows: list[list[int]] = [[]] * missing
        parts.append(packing.fill(empty_rows, [], self._config.shape))
        arrays = {
            name: np.concatenate([part[name] for part in parts])[self._config.own_rows]
            for name in parts[0]
        }
        return RowBatch(arrays, self._num_too_long())

    def _num_too_long(self) -> int:
        in_pool = self._pool.num_too_long if self._pool else 0
        return self._num_too_long_before_pool + in_pool

    def _current_pool(self) -> _Pool | None:
        """The pool that holds the next row, or None at the end."""
        if self._pool is not None and self._next_row == self._pool.num_rows:
            self._num_too_long_before_pool += self._pool.num_too_long
            self._pool_start += _POOL_EXAMPLES
            self._next_row, self._pool = 0, None
        if self._pool is None and self._pool_start < len(self._examples):
            self._pool = self._make_pool(self._pool_start)
        return self._pool

    def _make_pool(self, start: int) -> _Pool:
        config = self._config
        read = self._examples.read(start, start + _POOL_EXAMPLES)
        examples = [config.shape.truncate(example) for example in read]
        if config.rows is packing.Rows.PACKED:
            rows = packing.plan_rows(packing.lengths_of(examples), config.shape)
        else:
            rows = [[index] for index in range(len(examples))]
        if config.shuffle:
            np.random.default_rng([config.seed, start]).shuffle(rows)
        else:
            rows.sort()
        num_too_long = sum(not config.shape.fits(example) for example in read)
        return _Pool(packing.fill(rows, examples, config.shape), len(rows), num_too_long)
