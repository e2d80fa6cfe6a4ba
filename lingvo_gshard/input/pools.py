"""Batches of packed rows from a stream of examples, with a state of three numbers.

A pool is a run of consecutive examples of the stream, enough for a few batches. It is packed as a
whole and its rows are shuffled; batches are cut from one pool after the other. Where a pool starts
and how many of its rows are gone is all there is to resume from: packing it again gives the same
rows.
"""

import dataclasses
from typing import Any

import grain.python as grain
import numpy as np
from absl import logging

from lingvo_gshard.input import packing
from lingvo_gshard.input.example_codec import Example

_MIN_POOL_ROWS = 128
_POOL_BATCHES = 2
# So many examples in a row that do not fit are a mistake in the lengths, not bad luck.
_MAX_SKIPPED_RUN = 10_000


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """How examples become batches.

    Of examples longer than a row, those of an endless stream are skipped, those of a finite one
    (an evaluation, where each counts) are truncated.
    """

    batch_size: int
    shape: packing.RowShape
    packed: bool
    shuffle: bool
    truncate: bool
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size {self.batch_size}: expected at least 1")


@dataclasses.dataclass(frozen=True)
class RowBatch:
    """The arrays of `packing.fill`, [batch_size, L], and the examples too long for a row so far."""

    arrays: dict[str, np.ndarray]
    num_too_long: int


@dataclasses.dataclass(frozen=True)
class _Pool:
    """Packed rows, and the stream's position after them."""

    arrays: dict[str, np.ndarray]
    num_rows: int
    end: int
    num_too_long: int


class PooledBatches(grain.IterDataset[RowBatch]):
    """The batches of a stream as a Grain dataset."""

    def __init__(self, examples: grain.MapDataset[Example], config: PoolConfig):
        super().__init__()
        self._examples = examples
        self._config = config

    def __iter__(self) -> "PooledBatchIterator":
        return PooledBatchIterator(self._examples, self._config)


class PooledBatchIterator(grain.DatasetIterator[RowBatch]):
    """One pass; ends with the stream. The last batch is filled up with empty rows."""

    def __init__(self, examples: grain.MapDataset[Example], config: PoolConfig):
        super().__init__()
        self._examples = examples
        self._config = config
        self._pool: _Pool | None = None
        self._pool_start = 0
        self._next_row = 0
        self._num_too_long_before_pool = 0

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
        if missing:
            empty_rows: list[list[int]] = [[]] * missing
            parts.append(packing.fill(empty_rows, [], self._config.shape))
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return RowBatch(arrays, self._num_too_long())

    def _num_too_long(self) -> int:
        in_pool = self._pool.num_too_long if self._pool else 0
        return self._num_too_long_before_pool + in_pool

    def _current_pool(self) -> _Pool | None:
        """The pool that holds the next row, or None at the end of the stream."""
        if self._pool is not None and self._next_row == self._pool.num_rows:
            self._num_too_long_before_pool += self._pool.num_too_long
            self._pool_start, self._next_row, self._pool = self._pool.end, 0, None
        if self._pool is None and self._pool_start < len(self._examples):
            self._pool = self._make_pool(self._pool_start)
        return self._pool

    def _make_pool(self, start: int) -> _Pool:
        config = self._config
        pool, end, num_too_long = self._gather(start)
        if config.packed:
            rows = packing.plan_rows(pool, config.shape)
        else:
            rows = [[index] for index in range(len(pool))]
        # Packing opens rows for the longest pairs first: put them in another order.
        if config.shuffle:
            np.random.default_rng([config.seed, start]).shuffle(rows)
        else:
            rows.sort()
        return _Pool(packing.fill(rows, pool, config.shape), len(rows), end, num_too_long)

    def _gather(self, start: int) -> tuple[list[Example], int, int]:
        """Reads examples for a pool: returns them, the position after, the number too long."""
        config = self._config
        num_rows = max(_MIN_POOL_ROWS, _POOL_BATCHES * config.batch_size)
        pool: list[Example] = []
        rows_needed = 0.0
        num_too_long = 0
        position = start
        while position < len(self._examples) and rows_needed < num_rows:
            example = self._examples[position]
            assert example is not None  # Nothing in the stream filters.
            position += 1
            if not config.shape.fits(example):
                num_too_long += 1
                if not config.truncate:
                    self._check_progress(position - start, len(pool))
                    continue
                example = config.shape.truncate(example)
            pool.append(example)
            rows_needed += _row_share(example, config)
        if num_too_long:
            what = "truncated" if config.truncate else "skipped"
            logging.log_first_n(
                logging.INFO, "%s %d examples longer than %s", 3, what, num_too_long, config.shape
            )
        return pool, position, num_too_long

    def _check_progress(self, num_read: int, num_kept: int) -> None:
        if num_read >= _MAX_SKIPPED_RUN and not num_kept:
            raise ValueError(f"none of {num_read} examples in a row fits {self._config.shape}")


def _row_share(example: Example, config: PoolConfig) -> float:
    if not config.packed:
        return 1.0
    return max(
        len(example.source_ids) / config.shape.source_len,
        len(example.target_ids) / config.shape.target_len,
    )
