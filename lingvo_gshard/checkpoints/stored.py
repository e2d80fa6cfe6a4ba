"""One checkpoint's folder: its description and its arrays, read and checked.

about/metadata holds the fingerprints of the saved arrays, which are compared with the fingerprints
of the restored arrays; see fingerprints.py. It also has the arrays' shapes: in the files, an array
may be padded, because it did not divide by the devices. The padding is never read.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import NamedSharding

from lingvo_gshard.checkpoints.checked_array import CheckedArray, Index, first_line, is_weight
from lingvo_gshard.checkpoints.fingerprints import difference, fingerprint
from lingvo_gshard.files import finite
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import padded, processes, specs
from lingvo_gshard.spmd.padded import PaddedArray
from xla_spmd.files import digests, json_records
from xla_spmd.runtime import environment, progress

_Result = TypeVar("_Result")
_MAX_INT32 = 2**31 - 1
_BYTES_AT_ONCE = 128 * 2**20  # The host memory for arrays that are read onto the devices.


class DamagedCheckpointError(ValueError):
    """A checkpoint's files were changed, cut or lost after it was saved."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A complete checkpoint of any model: its arrays' specs and fingerprints."""

    path: pathlib.Path
    specs: dict[str, TensorSpec]  # By the arrays' dotted paths.
    fingerprints: dict[str, list[str]]  # By the same paths; see fingerprint.
    input_state: dict[str, Any]
    # Other names of arrays in the files, by path; see averages.py.
    stored_as: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, path: pathlib.Path) -> Self:
        """Reads a checkpoint's description, but not its arrays.

        Raises DamagedCheckpointError if the description is missing or damaged.
        """
        with _read_errors(path):
            about = _json_object(path, "about")
            input_state = _json_object(path, "input_state")
            digest = about.pop("digest", None)

            # The digest covers everything that the fingerprints do not.
            if "arrays" not in about or digest != digests.of_json(about, input_state):
                raise ValueError("about/metadata or input_state/metadata was changed")
            arrays = {name: specs.from_json(text) for name, text in about["arrays"].items()}
            return cls(path, arrays, about["fingerprints"], input_state)

    def arrays(self) -> dict[str, CheckedArray]:
        """Returns the arrays by path; each part is read when it is used."""
        # The arrays share a context, with its cache and threads.
        context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
        damage_error = functools.partial(damaged, self.path)
        arrays = {}
        for name, spec in self.specs.items():
            open_view = functools.partial(self._open, name, context)
            arrays[name] = CheckedArray(
                name, spec, open_view, self.fingerprints[name], damage_error, str(self.path)
            )
        return arrays

    def _open(self, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
        """Opens an array in the files in which Orbax stores it."""
        info = ocp.type_handlers.ParamInfo(
            name=self.stored_as.get(name, name),
            parent_dir=self.path / "state",
            ts_context=context,
        )
        spec = tensorstore.Spec(ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True))
        stored = tensorstore.open(spec, context=context).result()
        # Without the padding.
        return stored[tuple(slice(0, size) for size in self.specs[name].shape)]


def check_finite(source: str, arrays: Mapping[str, jax.Array | PaddedArray]) -> None:
    """Raises ValueError, in all processes, if a weight on the devices is not finite.

    `source` names the weights' origin in the error. All processes must call it.
    """
    counts = {}
    for name in filter(is_weight, arrays):
        shards = padded.on_devices(arrays[name]).addressable_shards
        own = [shard for shard in shards if shard.replica_id == 0]
        counts[name] = sum(finite.num_not_finite(np.asarray(shard.data)) for shard in own)

    if not counts:
        return
    # If several processes hold parts of a weight, the largest count is reported.
    largest = processes.largest([min(count, _MAX_INT32) for count in counts.values()])
    finite.check(source, dict(zip(counts, largest, strict=True)))


def restored(
    source: str, arrays: Mapping[str, CheckedArray], shardings: Mapping[str, NamedSharding]
) -> dict[str, jax.Array | PaddedArray]:
    """Reads arrays onto the devices, each at the sharding of its name, and checks them there.

    `source` names the arrays' origin in errors. All processes must call it. Raises the `damaged`
    error of an array that differs from the saved one, which names its experts, and ValueError if a
    weight is not finite.
    """
    on_devices = in_all_processes(source, lambda: placed(arrays, shardings))

    # On the devices, so that errors between the files and the devices are found as well.
    for name, values in on_devices.items():
        array = arrays[name]
        # An array without fingerprints was computed from others, which reading has checked.
        if array.fingerprints is not None:
            computed = fingerprint(values, array.spec.dims)
            reason = difference(array.name, array.fingerprints, computed)
            if reason:
                raise array.damaged(reason)
    environment.return_freed_memory()
    check_finite(source, on_devices)
    return on_devices


def placed(
    arrays: Mapping[str, CheckedArray], shardings: Mapping[str, NamedSharding]
) -> dict[str, jax.Array | PaddedArray]:
    """Reads arrays onto the devices, each at the sharding of its name, unchecked.

    Arrays pass through this process's memory: at most _BYTES_AT_ONCE of them at a time, or a single
    larger one. In the end, this memory is returned to the kernel.
    """
    budget = _Budget(_BYTES_AT_ONCE)
    num_bytes = sum(_own_bytes(arrays[name], sharding) for name, sharding in shardings.items())

    def place(name: str) -> jax.Array | PaddedArray:
        array = arrays[name]
        shape = padded.padded_shape(shardings[name], array.shape)
        own_bytes = _own_bytes(array, shardings[name])

        def read(index: Index | None) -> np.ndarray:
            assert index is not None
            return array.read_padded(index, shape)

        with budget.taken(own_bytes):
            on_devices = jax.make_array_from_callback(shape, shardings[name], read)
            jax.block_until_ready(on_devices)
        done.update(own_bytes)
        return padded.of_shape(on_devices, array.shape)

    # Threads read several arrays at once, as reading waits for disks and networks.
    reading = progress.shown("reading weights", total=num_bytes, unit=progress.BYTES)
    with reading as done, ThreadPoolExecutor() as threads:
        on_devices = dict(zip(shardings, threads.map(place, shardings), strict=True))
    environment.return_freed_memory()
    return on_devices


def _own_bytes(array: CheckedArray, sharding: NamedSharding) -> int:
    """Returns the bytes of an array that this process's devices hold."""
    shape = padded.padded_shape(sharding, array.shape)
    shard_bytes = math.prod(sharding.shard_shape(shape)) * array.dtype.itemsize
    return shard_bytes * len(sharding.addressable_devices)


class _Budget:
    """Limits the bytes that threads hold together; a thread that needs more must hold alone."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Waits until `num_bytes` are free, and holds them for the block."""
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


def damaged(path: pathlib.Path | str, reason: str) -> DamagedCheckpointError:
    """Returns the error for the checkpoint at `path`."""
    return DamagedCheckpointError(f"{path}: the checkpoint is damaged: {reason.rstrip('.')}.")


def in_all_processes(path: pathlib.Path | str, read: Callable[[], _Result]) -> _Result:
    """Returns read(), or raises DamagedCheckpointError in all processes if `read` does in one.

    Otherwise the others would wait for that process forever. All processes must call it.
    """
    damage = ""
    try:
        result = read()
    except DamagedCheckpointError as error:
        damage = str(error)  # The error itself would hold the arrays in memory.

    # Process i votes i + 1, and 0 if it found no damage.
    vote = jax.process_index() + 1 if damage else 0
    largest_vote = processes.largest([vote])[0]
    if largest_vote > 0:
        elsewhere = damaged(path, f"process {largest_vote - 1} names the file")
        raise DamagedCheckpointError(damage or str(elsewhere))
    return result


def _json_object(path: pathlib.Path, item: str) -> dict[str, Any]:
    """Reads the JSON object that Orbax's JsonCheckpointHandler wrote as `item`."""
    try:
        return dict(json_records.parse((path / item / "metadata").read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{item}/metadata is not a JSON object: {error}") from None


@contextlib.contextmanager
def _read_errors(path: pathlib.Path) -> Iterator[None]:
    """Raises DamagedCheckpointError if reading a description fails.

    Other errors of files, such as a missing permission, do not mean damage.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError):
            raise
        raise damaged(path, first_line(error)) from error
