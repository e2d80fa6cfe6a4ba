"""A checkpoint that is written array by array from arrays that are read part by part.

It is for states that are larger than a host's memory and lie on no device yet. The result is a
checkpoint like all others (checkpoints.py), without the notes that Orbax keeps for itself:

    model_dir/checkpoints/STEP.import/             while it is written
        journal.jsonl                              the arrays that are complete, and their source
        state/, input_state/, about/               as in any checkpoint
    model_dir/checkpoints/STEP                     in the end

A process that was killed is continued by the next one from the same source: arrays in the journal
are not written again.
"""

import collections
import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorstore

from lingvo_gshard.checkpoints import averages
from lingvo_gshard.checkpoints.checkpoints import COMMITTED, Contents, folder
from lingvo_gshard.checkpoints.fingerprints import PartSums, difference
from lingvo_gshard.checkpoints.stored import Index, SavedArray
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import atomic_file, digests, json_records, storage
from lingvo_gshard.sharding.layout import TensorSpec

# A part that is read, hashed and written at a time.
PART_BYTES = 64 * 2**20
# Arrays that are written at a time, each with a part that is read and one that is written.
_THREADS = 4
_JOURNAL = "journal.jsonl"


@dataclasses.dataclass(frozen=True)
class Written:
    """What was written."""

    num_arrays: int
    num_continued: int  # Of them, those that were complete already.
    num_bytes: int  # Of the others.


def zeros(path: str, spec: TensorSpec) -> SavedArray:
    """Returns an array of zeros, such as an optimizer's slot before the first step."""

    def read(index: Index) -> np.ndarray:
        sizes = [len(range(size)[part]) for part, size in zip(index, spec.shape, strict=True)]
        return np.zeros(sizes, spec.dtype)

    return SavedArray(path, spec, None, read, ValueError)


def first_state(state_spec: NestedMap, theta: Mapping[str, SavedArray]) -> dict[str, SavedArray]:
    """Returns the arrays of a state before its first step, given the weights by path, `theta`.

    Moving averages start at the weights, and the optimizer's slots at zero.
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
    arrays: Mapping[str, SavedArray],
    source: str,
) -> Written:
    """Writes the checkpoint of `step` with `arrays`, which are all those of contents.state_spec.

    `source` identifies where the arrays come from: a process that was killed is continued if it is
    the same. An array that has fingerprints is not checked part by part, for which more than a part
    might be read, but once it is written. Raises ValueError if there is a checkpoint of `step`, as
    `partial_folder`, and as reading the arrays does; then nothing of it is left.
    """
    partial = partial_folder(model_dir, step)
    target = partial.with_name(str(step))
    if target.exists():
        raise ValueError(f"{target}: there is such a checkpoint already.")

    fingerprints = _continued(partial, source)
    missing = {path: array for path, array in arrays.items() if path not in fingerprints}
    context = tensorstore.Context()  # Shared, so that its database is opened once.
    noting = threading.Lock()

    def write_array(path: str) -> None:
        fingerprint = _write_array(partial / "state", missing[path], context)
        with noting:
            fingerprints[path] = fingerprint
            _note(partial, {"array": path, "fingerprints": fingerprint})

    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            collections.deque(threads.map(write_array, missing), maxlen=0)
        _finish(partial, target, contents, {path: fingerprints[path] for path in arrays})
    except ValueError:
        shutil.rmtree(partial)
        raise
    num_bytes = sum(array.num_bytes for array in missing.values())
    return Written(len(arrays), len(arrays) - len(missing), num_bytes)


def partial_folder(model_dir: str | pathlib.Path, step: int) -> pathlib.Path:
    """Returns the folder that holds the checkpoint of `step` while it is written.

    Raises ValueError for one in gs://, which needs a disk instead.
    """
    path = folder(model_dir)
    if storage.is_bucket(path):
        raise ValueError(
            f"{path}: its arrays are written part by part, which needs a disk: give a folder "
            "there, and copy it."
        )
    return pathlib.Path(path) / f"{step}.import"


def _continued(partial: pathlib.Path, source: str) -> dict[str, list[str]]:
    """Returns the fingerprints of the arrays that are complete; begins anew without such."""
    lines = []
    journal = partial / _JOURNAL
    if journal.is_file():
        # The last line may have been cut.
        for line in journal.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                lines.append(json_records.parse(line))

    if not lines or lines[0] != {"source": source}:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _note(partial, {"source": source})
        return {}

    # Without what was cut, so that the next line does not continue it.
    atomic_file.write(journal, "".join(json.dumps(line) + "\n" for line in lines))
    return {line["array"]: line["fingerprints"] for line in lines[1:]}


def _note(partial: pathlib.Path, line: dict[str, Any]) -> None:
    """Appends a line to the journal, on the disk when this returns."""
    with (partial / _JOURNAL).open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_array(state: pathlib.Path, array: SavedArray, context: tensorstore.Context) -> list[str]:
    """Writes an array part by part; returns its fingerprints.

    Raises the array's error for damage if it has other fingerprints.
    """
    unchecked = dataclasses.replace(array, fingerprints=None)
    part_shape = _part_shape(array.spec)
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
    array: SavedArray,
    part_shape: tuple[int, ...],
    context: tensorstore.Context,
) -> tensorstore.TensorStore:
    """Makes an array in the form that Orbax gives it."""
    # NumPy knows no code for bfloat16, which zarr calls by its name.
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
        # Reading refuses chunks that are missing, those of zeros among them.
        "store_data_equal_to_fill_value": True,
    }
    return tensorstore.open(spec, create=True, delete_existing=True, context=context).result()


def _part_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Returns the shape of a part: of one block and expert, cut along another dim if too large.

    A vocabulary is cut along V, and else the first dim that remains is.
    """
    shape = [
        1 if letter.upper() in ("R", "E") else size
        for letter, size in zip(spec.dims, spec.shape, strict=True)
    ]
    if not shape:
        return ()

    # Where it would be cut, best first.
    dims = spec.dims.upper()
    cut = [axis for axis, letter in enumerate(dims) if letter == "V"]
    cut += [axis for axis, size in enumerate(shape) if size > 1 and axis not in cut]

    if cut:
        axis = cut[0]
        num_bytes = math.prod(shape) * np.dtype(spec.dtype).itemsize
        count = max(1, math.ceil(num_bytes / PART_BYTES))
        shape[axis] = math.ceil(shape[axis] / count)
    return tuple(shape)


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
    about = contents.described(fingerprints, num_processes=1)
    input_state: dict[str, Any] = {}
    about["digest"] = digests.of_json(about, input_state)
    for name, value in (("about", about), ("input_state", input_state)):
        (partial / name).mkdir(exist_ok=True)
        atomic_file.write(partial / name / "metadata", json.dumps(value))

    (partial / _JOURNAL).unlink()
    partial.rename(target)
    atomic_file.write(target / COMMITTED, "")
