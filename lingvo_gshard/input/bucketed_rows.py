"""The batches of an evaluation by length: one pair a row, and as many tokens in every batch.

There is a bucket for the row's lengths, for their halves and for their quarters, as far as they
divide. A pair is in the shortest that holds both of its sides; a batch of half the length has twice
the rows. So an evaluation compiles three programs, and a pair pays for at most twice its tokens.
"""

import dataclasses

import grain.python as grain
import numpy as np

from lingvo_gshard.input import packing
from lingvo_gshard.input.mixture import OnePass
from lingvo_gshard.input.one_pass_rows import OnePassConfig, read_rows
from lingvo_gshard.input.training_rows import RowBatch

_MAX_HALVINGS = 2


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Rows of one shape; `scale` is by how much shorter they are, and more in a batch."""

    shape: packing.RowShape
    scale: int


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The examples of a batch, and how many in it and before were too long for the longest row."""

    bucket: Bucket
    examples: np.ndarray
    num_too_long: int


def buckets(shape: packing.RowShape) -> list[Bucket]:
    """The buckets of rows of at most `shape`, shortest first."""
    scales = [2**halvings for halvings in range(_MAX_HALVINGS, -1, -1)]
    return [
        Bucket(packing.RowShape(shape.source_len // scale, shape.target_len // scale), scale)
        for scale in scales
        if shape.source_len % scale == shape.target_len % scale == 0
    ]


class BucketedRows(grain.MapDataset[RowBatch]):
    """The batches of one pass by their number."""

    def __init__(self, examples: OnePass, config: OnePassConfig) -> None:
        """Deals all examples out by their lengths."""
        super().__init__()
        self._examples, self._config = examples, config
        self._batches = _plan(examples.lengths(0, len(examples)), config)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> RowBatch:  # type: ignore[override]
        """The rows of batch `index` that are this process's, the last of a bucket filled up."""
        batch, own = self._batches[index], self._config.own_rows
        scale = batch.bucket.scale
        members = batch.examples[own.start * scale : own.stop * scale].tolist()
        rows = [[number] for number in members]
        rows += [[]] * ((own.stop - own.start) * scale - len(rows))
        return RowBatch(read_rows(self._examples, rows, batch.bucket.shape), batch.num_too_long)


def _plan(lengths: np.ndarray, config: OnePassConfig) -> list[_Batch]:
    """Deals examples of int [n, 2] lengths out to batches."""
    found = buckets(config.shape)
    bounds = np.array([(one.shape.source_len, one.shape.target_len) for one in found])
    is_too_long = (lengths > bounds[-1]).any(axis=1)
    # By the longer side; what no bucket holds is truncated to the last one.
    of_side = [np.searchsorted(bounds[:, side], lengths[:, side]) for side in (0, 1)]
    bucket_of = np.minimum(np.maximum(*of_side), len(found) - 1)
    dealt = []
    for number, bucket in enumerate(found):
        members = np.flatnonzero(bucket_of == number)
        size = config.batch_size * bucket.scale
        dealt += [(bucket, members[i : i + size]) for i in range(0, len(members), size)]
    if config.shuffle:  # So that the first batches, too, are of all lengths.
        order = np.random.default_rng(config.seed).permutation(len(dealt))
        dealt = [dealt[i] for i in order]
    counts = np.cumsum([is_too_long[members].sum() for _, members in dealt], dtype=np.int64)
    return [_Batch(*one, int(count)) for one, count in zip(dealt, counts, strict=True)]
