"""Slots of biases that earlier versions factored into a `row` and a `column`.

For a bias with several dims, such as attention's [N, D], earlier versions factored Adafactor's
second moment into its means over the last dim and over the one before it. Today's optimizer does
not factor it, and its slot is called `full`. A run continues from row * column / mean(row), the
rank-one matrix that the earlier optimizer computed with.
"""

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np
from tensorstore import TensorStore

from lingvo_gshard.checkpoints.checked_array import CheckedArray, Index, computed_view
from lingvo_gshard.checkpoints.stored import Stored
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec


def fitted(checkpoint: Stored, state_spec: NestedMap) -> Stored:
    """Returns a checkpoint whose factored slots are `full` where `state_spec` has such slots.

    Logs their number. The other arrays stay unchanged, and may differ from `state_spec`.
    """
    wanted = dict(state_spec.FlattenItems())
    saved = checkpoint.arrays()
    specs = dict(checkpoint.specs)
    fingerprints = dict(checkpoint.fingerprints)
    computed = dict(checkpoint.computed)

    for path, spec in wanted.items():
        slots, _, name = path.rpartition(".")
        row = f"{slots}.row"
        column = f"{slots}.column"
        if name != "full" or path in saved or not _are_factors(saved, row, column, spec):
            continue

        computed[path] = _product(path, spec, saved[row], saved[column])
        specs[path] = spec
        for factor in (row, column):
            del specs[factor]
            del fingerprints[factor]

    num_computed = len(computed) - len(checkpoint.computed)
    if num_computed:
        logging.warning(
            "%s: Adafactor's slots of %d biases were factored; they continue unfactored.",
            checkpoint.path,
            num_computed,
        )
    return dataclasses.replace(
        checkpoint, specs=specs, fingerprints=fingerprints, computed=computed
    )


def _are_factors(
    saved: Mapping[str, CheckedArray], row: str, column: str, spec: TensorSpec
) -> bool:
    """Returns whether both slots were saved, and their product has the shape of `spec`."""
    if row not in saved or column not in saved or len(spec.shape) < 2:
        return False
    *outer, num_rows, num_columns = spec.shape
    return (saved[row].shape, saved[column].shape) == (
        (*outer, num_rows),
        (*outer, num_columns),
    )


def _product(path: str, spec: TensorSpec, row: CheckedArray, column: CheckedArray) -> CheckedArray:
    """Returns the slot `full`, which is computed from its checked factors when it is read."""

    def compute(index: Index, values: np.ndarray) -> None:
        rows = np.asarray(row[()], np.float64)
        columns = np.asarray(column[()], np.float64)

        # Before the first step, all elements are 0.
        mean = rows.mean(-1, keepdims=True)
        shares = np.divide(rows, mean, out=np.zeros_like(rows), where=mean > 0)
        full = shares[..., :, None] * columns[..., None, :]
        values[...] = full[index]

    def open_view() -> TensorStore:
        return computed_view(compute, spec.shape, spec.dtype)

    return dataclasses.replace(row, name=path, spec=spec, fingerprints=None, open=open_view)
