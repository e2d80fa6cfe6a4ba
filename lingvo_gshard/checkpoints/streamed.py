"""A checkpoint that is written part by part, from arrays that are not on devices.

It is for states that are larger than a host's memory. The result is a checkpoint like all others
(checkpoints.py), but lacks the files that only Orbax reads:

    model_dir/checkpoints/STEP.import/             while it is written
        journal.jsonl                              the arrays that are complete, and their source
        state/, input_state/, about/               as in any checkpoint
    model_dir/checkpoints/STEP                     in the end

After a process was killed, the next one from the same source continues: it does not write the
arrays in the journal again.
"""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorstore

from lingvo_gshard.checkpoints import averages, checked_array, saved_steps
from lingvo_gshard.checkpoints.checked_array import CheckedArray, Index
from lingvo_gshard.checkpoints.checkpoints import Contents
from lingvo_gshard.checkpoints.fingerprints import PartSums, difference
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec
from xla_spmd.files import atomic_file, json_records
from xla_spmd.runtime import progress

# Arrays that are written at a time; for each, one part is read while another is written.
_THREADS = 4
_JOURNAL = "journal.jsonl"


@dataclasses.dataclass(frozen=True)
class Written:
    """Counts of the arrays in a new checkpoint."""

    num_arrays: int  # All arrays of the checkpoint.
    num_continued: int  # The arrays that an earlier process had completed.
    num_bytes: int  # The size of the arrays that this process has written.


def zeros(path: str, spec: TensorSpec) -> CheckedArray:
    """Returns an array of zeros, such as an optimizer's slot before the first step."""
    return CheckedArray(path, spec, lambda: checked_array.zeros(spec.shape, spec.dtype))


def first_state(
    state_spec: NestedMap, theta: Mapping[str, CheckedArray]
) -> dict[str, CheckedArray]:
    """Returns the arrays of a state before its first step, given the weights `theta` by path.

    Moving averages start as the weights, and the optimizer's slots as zeros.
    """
    weights = averages.as_weights(theta)
    arrays = {}
    for path, spec in state_spec.FlattenItems():
        if path.startswith(("theta.", "ema.")):
            arrays[path] = dataclasses.replace(weights[path], name=path, spec=spec)
        else:
            arrays[path] = zeros(path, spec)
    return arrays


def write(
    model_dir: str | pathlib.Path,
    step: int,
    contents: Contents,
    arrays: Mapping[str, CheckedArray],
    source: str,
) -> Written:
    """Writes the checkpoint of `step` with `arrays`, which must have all of contents.state_spec.

    `source` identifies the arrays' origin: the work of a killed process is continued if it had the
    same source. An array with fingerprints is checked when all of it is written, since checking its
    parts would read more than these. Raises ValueError if there is a checkpoint of `step`, if the
    folder is in gs://, or if an array is damaged or not finite; then it deletes what it has
    written.
    """
    partial = saved_steps.partial_folder(model_dir, step)
    target = partial.with_name(str(step))
    if target.exists():
        raise ValueError(f"{target}: there is such a checkpoint already.")

    fingerprints = _continued(partial, source)
    missing = {path: array for path, array in arrays.items() if path not in fingerprints}
    context = tensorstore.Context()  # Shared, so that its database is opened once.
    noting = threading.Lock()

    def write_array(path: str) -> None:
        fingerprint = _write_array(partial / "state", missing[path], context, done.update)
        with noting:
            fingerprints[path] = fingerprint
            _note(partial, {"array": path, "fingerprints": fingerprint})

    num_bytes = sum(array.num_bytes for array in missing.values())
    copying = progress.shown("copying weights", total=num_bytes, unit=progress.BYTES)
    try:
        with copying as done, ThreadPoolExecutor(_THREADS) as threads:
            collections.deque(threads.map(write_array, missing), maxlen=0)
        _finish(partial, target, contents, {path: fingerprints[path] for path in arrays})
    except ValueError:
        shutil.rmtree(partial)
        raise
    return Written(len(arrays), len(arrays) - len(missing), num_bytes)


def _continued(partial: pathlib.Path, source: str) -> dict[str, list[str]]:
    """Returns the fingerprints of the arrays that are complete already.

    Creates the folder, or deletes the arrays of another source.
    """
    lines = []
    journal = partial / _JOURNAL
    if journal.is_file():
        # The last line may be incomplete.
        for line in journal.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                lines.append(json_records.parse(line))

    if not lines or lines[0] != {"source": source}:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _note(partial, {"source": source})
        return {}

    # Without an incomplete line, which the next line would continue.
    atomic_file.write(journal, "".join(json.dumps(line) + "\n" for line in lines))
    return {line["array"]: line["fingerprints"] for line in lines[1:]}


def _note(partial: pathlib.Path, line: dict[str, Any]) -> None:
    """Appends a line to the journal, and waits until it is on the disk."""
    with (partial / _JOURNAL).open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_array(
    state: pathlib.Path,
    array: CheckedArray,
    context: tensorstore.Context,
    on_part: Callable[[int], None],
) -> list[str]:
    """Writes an array part by part; returns its fingerprints. Calls `on_part` with parts' bytes.

    Raises the array's `damaged` error if it should have other fingerprints.
    """
    unchecked = dataclasses.replace(array, fingerprints=None)
    part_shape = checked_array.part_shape(array.spec)
    store = _create(state, array, part_shape, context)
    sums = PartSums(array.spec.dims, array.shape)

    # The next part is read while this one is written.
    writing = None
    for index in _parts(array.shape, part_shape):
        part = np.asarray(unchecked[index], order="C")
        sums.add(tuple(along_dim.start for along_dim in index), part)
        if writing is not None:
            writing.result()
        writing = store[index].write(part)
        on_part(part.nbytes)
    if writing is not None:
        writing.result()

    computed = sums.fingerprint()
    if array.fingerprints is not None:
        reason = difference(array.name, array.fingerprints, computed)
        if reason:
            raise array.damaged(reason)
    return computed


def _create(
    state: pathlib.Path,
    array: CheckedArray,
    part_shape: tuple[int, ...],
    context: tensorstore.Context,
) -> tensorstore.TensorStore:
    """Creates an array in Orbax's format."""
    # NumPy lacks a code for bfloat16, and zarr uses its name.
    dtype = array.dtype
    zarr_dtype = dtype.name if dtype.name == "bfloat16" else dtype.newbyteorder("<").str

    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{state}/"},
            "path": array.name,
        },
        "metadata": {
            "shape": list(array.shape),
            "chunks": list(part_shape),
            "dtype": zarr_dtype,
            "compressor": None,
        },
        # Chunks of zeros are written as well: a missing chunk is an error when it is read.
        "store_data_equal_to_fill_value": True,
    }
    return tensorstore.open(spec, create=True, delete_existing=True, context=context).result()


def _parts(shape: tuple[int, ...], part_shape: tuple[int, ...]) -> Iterator[Index]:
    """Yields the index of each part, in row-major order."""
    by_axis = []
    for size, step in zip(shape, part_shape, strict=True):
        by_axis.append([slice(i, min(i + step, size)) for i in range(0, size, step)])
    return itertools.product(*by_axis)


def _finish(
    partial: pathlib.Path,
    target: pathlib.Path,
    contents: Contents,
    fingerprints: Mapping[str, list[str]],
) -> None:
    """Writes the description, and makes the checkpoint complete."""
    input_state: dict[str, Any] = {}
    about = contents.described(fingerprints, num_processes=1, input_state=input_state)
    for name, value in (("about", about), ("input_state", input_state)):
        (partial / name).mkdir(exist_ok=True)
        atomic_file.write(partial / name / "metadata", json.dumps(value))

    (partial / _JOURNAL).unlink()
    partial.rename(target)
    atomic_file.write(target / saved_steps.COMMITTED, "")
