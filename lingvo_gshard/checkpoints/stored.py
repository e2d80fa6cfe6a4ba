"""One checkpoint's folder: what it holds, read back and checked.

about/metadata holds the fingerprints of the arrays that were saved, which are computed again for
the arrays that are read; see fingerprints.py. It also has the arrays' shapes: a file may hold more,
the padding of an array that the devices did not divide, and that is never read.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.checkpoints.fingerprints import difference, fingerprint
from lingvo_gshard.files import digests, json_records
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import environment, padded, processes, specs
from lingvo_gshard.spmd.padded import PaddedArray

Index = tuple[slice, ...]
_Result = TypeVar("_Result")
# TensorStore's status codes for damaged files; the others are failures of the machine.
_DAMAGE = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "INVALID_ARGUMENT", "FAILED_PRECONDITION")
_BYTES_AT_ONCE = 128 * 2**20  # Of arrays that are read onto the devices.
# A file that only versions without a digest of the description wrote.
_OF_EARLIER_VERSIONS = "digests.json"


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A complete checkpoint of any model: its arrays' specs, and their fingerprints by expert."""

    path: pathlib.Path
    specs: dict[str, TensorSpec]  # By the arrays' dotted paths.
    fingerprints: dict[str, list[str]]  # By the same paths.
    input_state: dict[str, Any]
    # The arrays that are other ones in the files, by path; see averages.py.
    stored_as: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, path: pathlib.Path) -> Self:
        """Reads a checkpoint's description, but no array yet.

        Raises DamagedCheckpointError, as all methods do, and ValueError for a checkpoint of an
        earlier version.
        """
        with _read_errors(path):
            about = _json_object(path, "about")
            input_state = _json_object(path, "input_state")
            digest = about.pop("digest", None)
            is_earlier = digest is None and (path / _OF_EARLIER_VERSIONS).exists()

        # It is whole, so it is neither reported as damaged nor moved away.
        if is_earlier:
            raise ValueError(
                f"{path}: an earlier version wrote this checkpoint. Continue with that version, or "
                f"export the weights with it and set train.warm_start_from to the exported file."
            )

        # The digest is of everything that is not checked by a fingerprint.
        with _read_errors(path):
            if "arrays" not in about or digest != digests.of_json(about, input_state):
                raise ValueError("about/metadata or input_state/metadata was changed")
            arrays = {name: specs.from_json(text) for name, text in about["arrays"].items()}
            return cls(path, arrays, about["fingerprints"], input_state)

    def check(self, arrays: Mapping[str, jax.Array | PaddedArray]) -> None:
        """Compares the fingerprints of restored arrays with the saved ones.

        Raises DamagedCheckpointError, which names the array and the experts that differ.
        """
        for name, array in arrays.items():
            computed = fingerprint(array, self.specs[name].dims)
            reason = difference(name, self.fingerprints[name], computed)
            if reason:
                raise damaged(self.path, reason)
        environment.return_freed_memory()

    def arrays(self) -> dict[str, "SavedArray"]:
        """Returns the arrays by path; a part of one is read when it is used."""
        # The arrays share a context, and so its cache and threads.
        context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
        damage_error = functools.partial(damaged, self.path)
        arrays = {}
        for name, spec in self.specs.items():
            read = functools.partial(self._read, name, context)
            arrays[name] = SavedArray(name, spec, self.fingerprints[name], read, damage_error)
        return arrays

    def _read(self, name: str, context: tensorstore.Context, index: Index) -> np.ndarray:
        """Reads [index] of an array, unchecked."""
        # TensorStore, in which Orbax stores the arrays, reads any part of one.
        info = ocp.type_handlers.ParamInfo(
            name=self.stored_as.get(name, name),
            parent_dir=self.path / "state",
            ts_context=context,
        )
        spec = tensorstore.Spec(ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True))
        # A whole dim ends where the array does, which may be before the file's padding.
        index = whole_slices(index, self.specs[name].shape)
        with _read_errors(self.path):
            return tensorstore.open(spec, context=context).result()[index].read().result()


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array of a checkpoint or of exported files, read when it is indexed with slices.

    If there are fingerprints, every expert that an index touches is read whole and checked, and an
    array without dim E is read whole. Damage is raised as the error that `damaged` makes.
    """

    name: str
    spec: TensorSpec
    fingerprints: list[str] | None  # One for each expert, or one in all without dim E.
    read: Callable[[Any], np.ndarray]  # Takes a slice for each dim; what it returns is unchecked.
    damaged: Callable[[str], ValueError]  # Makes the error, given the reason.

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.spec.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, axis: int, start: int, stop: int) -> "SavedArray":
        """Returns [start:stop] along `axis` as an array of its own, which reads from this one."""
        index = (*[slice(None)] * axis, slice(start, stop))
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        spec = dataclasses.replace(self.spec, shape=shape)
        # It needs no fingerprints, since reading from this array checks.
        return dataclasses.replace(self, spec=spec, fingerprints=None, read=lambda _: self[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[()]  # So np.asarray reads it.

    def __getitem__(self, index: Index) -> np.ndarray:
        """Returns [index], checked; dims behind those of `index` are whole."""
        wanted = whole_slices(index, self.shape)
        if self.fingerprints is None:
            return self.read(wanted)

        read_range, within = whole_experts(wanted, self.spec.dims, self.shape)
        values = np.asarray(self.read(read_range))
        self._check(values, read_range)
        return np.asarray(values[within])

    def _check(self, values: np.ndarray, read_range: Index) -> None:
        """Raises the error of `damaged` unless [read_range], whole experts, is what was saved."""
        assert self.fingerprints is not None
        # A lowercase letter is the same dim, in the optimizer.
        dims = self.spec.dims.upper()
        if "E" in dims:
            expert_axis = dims.index("E")
            by_expert = np.moveaxis(values, expert_axis, 0)
            experts = read_range[expert_axis]
        else:
            by_expert = values[None]
            experts = slice(None)

        # On one device, and one expert at a time, which needs less memory.
        here = NamedSharding(Mesh(jax.local_devices()[:1], ("here",)), PartitionSpec())
        computed: list[str] = []
        for expert in by_expert:
            on_device = jax.device_put(expert.copy(), here)
            computed += fingerprint(on_device, dims.replace("E", ""))
            on_device.delete()  # Otherwise JAX keeps it for a while.

        reason = difference(self.name, self.fingerprints, computed, experts)
        if reason:
            raise self.damaged(reason)


def whole_slices(index: Index, shape: tuple[int, ...]) -> Index:
    """Returns an index with a slice for each dim, and with numbers for its ends and steps.

    [2:] of shape (8, 4) is [2:8:1, 0:4:1].
    """
    missing = [slice(None)] * (len(shape) - len(index))
    pairs = zip((*index, *missing), shape, strict=True)
    return tuple(slice(*given.indices(size)) for given, size in pairs)


def whole_experts(wanted: Index, dims: str, shape: tuple[int, ...]) -> tuple[Index, Index]:
    """Returns the range to read so that experts are whole, and what is wanted within that range.

    `wanted` has a slice for each dim. With dims EMH and shape (8, 4, 6), [2:5, 0:4, 0:6] is read
    for [2:5, 1:3, 0:6], which is its part [:, 1:3, 0:6]. Without dim E, the whole array is read.
    """
    read_range = [slice(0, size, 1) for size in shape]
    within = list(wanted)
    expert_axis = dims.upper().find("E")
    if expert_axis >= 0:
        # Along E only what is wanted is read, hence all of what is read is wanted.
        read_range[expert_axis] = wanted[expert_axis]
        within[expert_axis] = slice(None)
    return tuple(read_range), tuple(within)


def mean(arrays: Sequence[SavedArray]) -> SavedArray:
    """Returns the mean of arrays of one shape and dtype, computed in float64 part by part.

    Each array's part is checked when it is read.
    """
    last = arrays[-1]

    def read(index: Index) -> np.ndarray:
        total = arrays[0][index].astype(np.float64)
        for array in arrays[1:]:
            total += array[index].astype(np.float64)
        return np.asarray(total / len(arrays), last.dtype)

    return dataclasses.replace(last, fingerprints=None, read=read)


def placed(
    arrays: Mapping[str, SavedArray], shardings: Mapping[str, NamedSharding]
) -> dict[str, jax.Array | PaddedArray]:
    """Reads arrays onto the devices, each at the sharding of its name, unchecked.

    What is read is in this process's memory until it is on the devices, so that only as much as
    _BYTES_AT_ONCE is read at a time, or one array. This memory is returned to the kernel.
    """
    budget = _Budget(_BYTES_AT_ONCE)

    def place(name: str) -> jax.Array | PaddedArray:
        array = arrays[name]
        shape = padded.padded_shape(shardings[name], array.shape)
        own_bytes = math.prod(shardings[name].shard_shape(shape)) * array.dtype.itemsize
        own_bytes *= len(shardings[name].addressable_devices)

        read = functools.partial(_read_padded, array, shape)
        with budget.taken(own_bytes):
            on_devices = jax.make_array_from_callback(shape, shardings[name], read)
            return padded.of_shape(jax.block_until_ready(on_devices), array.shape)

    # Reading waits for disks and networks: threads do so for several arrays at once.
    with ThreadPoolExecutor() as threads:
        on_devices = dict(zip(shardings, threads.map(place, shardings), strict=True))
    environment.return_freed_memory()
    return on_devices


class _Budget:
    """Lets threads hold so many bytes together; one that needs more than that holds alone."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Waits until there are so many bytes, and holds them for the block."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_taken == 0 or self._num_taken + num_bytes <= self._num_bytes
            )
            self._num_taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._num_taken -= num_bytes
                self._changed.notify_all()


def _read_padded(
    array: SavedArray, padded_shape: tuple[int, ...], index: Index | None
) -> np.ndarray:
    """Reads [index] of an array padded to `padded_shape` by zeros, unchecked."""
    assert index is not None
    if padded_shape == array.shape:
        return array.read(index)

    # What the index covers of the array itself, which may be nothing.
    wanted = whole_slices(index, padded_shape)
    covered = [
        slice(min(part.start, size), min(part.stop, size))
        for part, size in zip(wanted, array.shape, strict=True)
    ]
    shape = tuple(part.stop - part.start for part in wanted)
    if any(part.start == part.stop for part in covered):
        return np.zeros(shape, array.dtype)

    values = np.asarray(array.read(tuple(covered)))
    return np.pad(values, padded.end_padding(values.shape, shape))


def damaged(path: pathlib.Path, reason: str) -> DamagedCheckpointError:
    """Returns the error for the checkpoint at `path`."""
    return DamagedCheckpointError(f"{path}: the checkpoint is damaged: {reason.rstrip('.')}.")


def in_all_processes(path: pathlib.Path, read: Callable[[], _Result]) -> _Result:
    """Returns read(), or raises DamagedCheckpointError in all processes if one process does.

    So no process waits for another that has given up. All processes must call it.
    """
    damage = ""
    try:
        result = read()
    except DamagedCheckpointError as error:
        damage = str(error)  # Without its traceback, which keeps the arrays that were read.

    # Process i counts as i + 1, so that 0 is left for "none".
    vote = jax.process_index() + 1 if damage else 0
    largest_vote = processes.largest([vote])[0]
    if largest_vote > 0:
        elsewhere = damaged(path, f"process {largest_vote - 1} names the file")
        raise DamagedCheckpointError(damage or str(elsewhere))
    return result


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, without TensorStore's specs."""
    line, _, _ = str(error).strip().partition("\n")
    line, _, _ = line.partition(" [tensorstore_spec")
    return line or repr(error)


def _json_object(path: pathlib.Path, item: str) -> dict[str, Any]:
    """Reads what Orbax's JsonCheckpointHandler wrote as `item`."""
    try:
        return dict(json_records.parse((path / item / "metadata").read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{item}/metadata is no JSON object: {error}") from None


@contextlib.contextmanager
def _read_errors(path: pathlib.Path) -> Iterator[None]:
    """Raises DamagedCheckpointError for the errors of a file that is cut, changed or missing."""
    try:
        yield
    except Exception as error:
        # Orbax and TensorStore wrap the error that says what happened.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__

        if not _is_damage(cause):
            raise
        raise damaged(path, first_line(cause)) from error


def _is_damage(error: BaseException) -> bool:
    """Returns whether an error is due to a file, not to this machine or a missing permission."""
    status = re.match("([A-Z_]+): ", str(error))  # TensorStore's messages begin with its code.
    if status is not None and status[1] not in _DAMAGE:
        return False
    if isinstance(error, FileNotFoundError):
        return True
    return not isinstance(error, OSError | MemoryError)
