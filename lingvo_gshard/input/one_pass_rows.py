"""The batches of an evaluation: every example once, the last batch filled up with empty rows.

Examples longer than a row are truncated: each counts. Which go into a row is planned from their
lengths, by all processes alike; each reads what goes into its own rows, and nothing else.
"""

import dataclasses
import itertools
from collections.abc import Sequence
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


def read_rows(
    examples: OnePass, rows: Sequence[Sequence[int]], shape: packing.RowShape
) -> dict[str, np.ndarray]:
    """Reads the examples whose numbers are in `rows`, and lays them out as `packing.fill`."""
    numbers = np.array([number for row in rows for number in row], np.int64)
    read = [shape.truncate(example) for example in examples.read(numbers)]
    place = itertools.count()
    return packing.fill([[next(place) for _ in row] for row in rows], read, shape)


@dataclasses.dataclass(frozen=True)
class _Pool:
    """Rows of the numbers of examples that follow each other; how many of these will be cut."""

    rows: list[list[int]]
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
        config, rows = self._config, self._next_rows()
        if not rows:
            raise StopIteration
        rows += [[]] * (config.batch_size - len(rows))
        arrays = read_rows(self._examples, rows[config.own_rows], config.shape)
        return RowBatch(arrays, self._num_too_long())

    def _next_rows(self) -> list[list[int]]:
        """Those of the next batch; fewer of the last one, none at the end."""
        rows: list[list[int]] = []
        while (missing := self._config.batch_size - len(rows)) and (pool := self._current_pool()):
            taken = pool.rows[self._next_row : self._next_row + missing]
            rows += taken
            self._next_row += len(taken)
        return rows

    def _num_too_long(self) -> int:
        in_pool = self._pool.num_too_long if self._pool else 0
        return self._num_too_long_before_pool + in_pool

    def _current_pool(self) -> _Pool | None:
        """The pool that holds the next row, or None at the end."""
        if self._pool is not None and self._next_row == len(self._pool.rows):
            self._num_too_long_before_pool += self._pool.num_too_long
            self._pool_start += _POOL_EXAMPLES
            self._next_row, self._pool = 0, None
        if self._pool is None and self._pool_start < len(self._examples):
            self._pool = self._make_pool(self._pool_start)
        return self._pool

    def _make_pool(self, start: int) -> _Pool:
        config = self._config
        lengths = self._examples.lengths(start, start + _POOL_EXAMPLES)
        longest = np.array([config.shape.source_len, config.shape.target_len])
        if config.rows is packing.Rows.PACKED:
            rows = packing.plan_rows(np.minimum(lengths, longest), config.shape)
        else:
            rows = [[index] for index in range(len(lengths))]
        if config.shuffle:
            np.random.default_rng([config.seed, start]).shuffle(rows)
        else:
            rows.sort()
        num_too_long = int((lengths > longest).any(axis=1).sum())
        return _Pool([[start + index for index in row] for row in rows], num_too_long)
