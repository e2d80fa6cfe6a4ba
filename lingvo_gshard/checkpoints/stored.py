"""One checkpoint's folder: what it holds, read back and checked.

about/metadata holds the fingerprints of the arrays that were saved, which the devices compute again
for those that are read. A fingerprint is the sum, modulo 2**32, of a hash of each element's bits
and position in an expert. Sums of parts add up to the sum of the whole, so every partitioning gives
the same one. It detects elements that were changed, moved or lost; it does not detect forgery.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.files import digests
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import processes, specs
from lingvo_gshard.spmd.executable import ONE_AT_A_TIME

Index = tuple[slice, ...]
_Result = TypeVar("_Result")
_SEEDS = (0x9E3779B9, 0x7F4A7C15)  # Two independent sums make 64 bits.
# TensorStore's status codes for damaged files; the others are failures of the machine.
_DAMAGE = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "INVALID_ARGUMENT", "FAILED_PRECONDITION")


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A complete checkpoint of any model: its arrays, and their fingerprints for each expert."""

    path: pathlib.Path
    specs: dict[str, TensorSpec]
    fingerprints: dict[str, list[str]]
    input_state: dict[str, Any]

    @classmethod
    def open(cls, path: pathlib.Path) -> Self:
        """Reads the description. Raises DamagedCheckpointError, as all methods do."""
        with _read_errors(path):
            contents, input_state = _fields(path, "about"), _fields(path, "input_state")
            written = contents.pop("digest", None)  # Earlier versions wrote none.
            expected = None, digests.of_json(contents, input_state)
            if "arrays" not in contents or written not in expected:
                raise ValueError("about/metadata or input_state/metadata was changed")
            arrays = {name: specs.from_json(text) for name, text in contents["arrays"].items()}
            return cls(path, arrays, contents["fingerprints"], input_state)

    def check(self, arrays: Mapping[str, jax.Array]) -> None:
        """Compares fingerprints; an error names the array and the experts that differ."""
        for name, array in arrays.items():
            found = fingerprint(array, self.specs[name].dims)
            if reason := _difference(name, self.fingerprints[name], found):
                raise damaged(self.path, reason)

    def arrays(self) -> dict[str, "SavedArray"]:
        """Returns the arrays by path, parts of which are read when they are used."""
        context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
        here = functools.partial(damaged, self.path)
        return {
            name: SavedArray(name, spec, self.fingerprints[name], read, here)
            for name, spec in self.specs.items()
            for read in [functools.partial(self._part, name, context)]
        }

    def _part(self, name: str, context: tensorstore.Context, index: Index) -> np.ndarray:
        folder = self.path / "state"
        info = ocp.type_handlers.ParamInfo(name=name, parent_dir=folder, ts_context=context)
        spec = tensorstore.Spec(ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True))
        with _read_errors(self.path):
            return tensorstore.open(spec, context=context).result()[index].read().result()


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array of a checkpoint or of exported files; an index of slices reads a part of it.

    With fingerprints, whole experts, or the whole array without any, are read and compared.
    """

    name: str
    spec: TensorSpec
    fingerprints: list[str] | None
    read: Callable[[Any], np.ndarray]  # Given a slice for each dim.
    damaged: Callable[[str], ValueError]  # Makes the error.

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.spec.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, index: Index) -> "SavedArray":
        """Returns [index] as an array, which np.asarray reads; `index` ends in its only range."""
        axis, size = len(index) - 1, index[-1].stop - index[-1].start
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        spec = dataclasses.replace(self.spec, shape=shape)
        return dataclasses.replace(self, spec=spec, fingerprints=None, read=lambda _: self[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[()]

    def __getitem__(self, index: Index) -> np.ndarray:
        dims = self.spec.dims.upper()
        given = (*index, *[slice(None)] * (len(dims) - len(index)))
        slices = [slice(*s.indices(n)) for s, n in zip(given, self.shape, strict=True)]
        if self.fingerprints is None:
            return self.read(tuple(slices))
        axis, own = dims.find("E"), [slice(0, n, 1) for n in self.shape]
        if axis >= 0:
            own[axis], slices[axis] = slices[axis], own[axis]
        part = np.asarray(self.read(tuple(own)))
        by_expert = np.moveaxis(part, axis, 0) if axis >= 0 else part[None]
        here = NamedSharding(Mesh(jax.local_devices()[:1], ("here",)), PartitionSpec())
        rest = dims.replace("E", "")
        found = []
        for one in by_expert:  # One expert at a time needs less memory.
            on_device = jax.device_put(one.copy(), here)
            found += fingerprint(on_device, rest)
            on_device.delete()  # Otherwise JAX keeps it for a while.
        experts = own[axis] if axis >= 0 else slice(None)
        if reason := _difference(self.name, self.fingerprints, found, experts):
            raise self.damaged(reason)
        return np.asarray(part[tuple(slices)])


def mean(arrays: Sequence[SavedArray]) -> SavedArray:
    """Returns the mean, in float64, of arrays alike, whose parts are checked when they are read."""
    last = arrays[-1]

    def read(index: Index) -> np.ndarray:
        total = functools.reduce(np.add, (array[index].astype(np.float64) for array in arrays))
        return np.asarray(total / len(arrays), last.dtype)

    return dataclasses.replace(last, fingerprints=None, read=read)


def placed(
    arrays: Mapping[str, SavedArray], shardings: Mapping[str, NamedSharding]
) -> dict[str, jax.Array]:
    """Reads arrays onto the devices, each at the sharding that is given for its name."""

    def place(name: str) -> jax.Array:
        return jax.make_array_from_callback(arrays[name].shape, shardings[name], arrays[name].read)

    with ThreadPoolExecutor() as threads:
        return dict(zip(shardings, threads.map(place, shardings), strict=True))


def damaged(path: pathlib.Path, reason: str) -> DamagedCheckpointError:
    """Returns the error for the checkpoint at `path`."""
    return DamagedCheckpointError(f"{path}: the checkpoint is damaged: {reason.rstrip('.')}.")


def in_all_processes(path: pathlib.Path, read: Callable[[], _Result]) -> _Result:
    """Returns read(), or raises DamagedCheckpointError in all processes if it does so in one."""
    damage = ""
    try:
        result = read()
    except DamagedCheckpointError as error:
        damage = str(error)  # Without its traceback, which keeps the arrays that were read.
    finder = processes.largest([jax.process_index() + 1 if damage else 0])[0] - 1
    if finder >= 0:
        elsewhere = str(damaged(path, f"process {finder} names the file"))
        raise DamagedCheckpointError(damage or elsewhere)
    return result


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, without TensorStore's specs."""
    line = str(error).strip().partition("\n")[0].partition(" [tensorstore_spec")[0]
    return line or repr(error)


def fingerprint(array: Any, dims: str) -> list[str]:
    """Returns 16 hex digits for each expert, or in all without dim E; all processes call it."""
    with ONE_AT_A_TIME:
        sums = np.asarray(_program(dims.upper(), array.sharding.mesh)(array))
    return [f"{high:08x}{low:08x}" for high, low in sums.tolist()]


@functools.cache
def _program(dims: str, mesh: Mesh):
    """Returns `_sums` jitted; JAX keeps a program for each shape, which many arrays share."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(functools.partial(_sums, dims=dims), out_shardings=everywhere)


def _sums(x: jax.Array, dims: str) -> jax.Array:
    """Returns uint32 [E, 2]."""
    by_expert = jnp.moveaxis(x, dims.index("E"), 0) if "E" in dims else x[None]
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(by_expert, unsigned).astype(jnp.uint32)
    position = jnp.zeros(by_expert.shape, jnp.uint32)  # Row-major within the expert.
    for axis in range(1, by_expert.ndim):
        stride = math.prod(by_expert.shape[axis + 1 :]) % 2**32
        index = jax.lax.broadcasted_iota(jnp.uint32, by_expert.shape, axis)
        position += index * jnp.uint32(stride)
    hashes = [_mixed(bits ^ _mixed(position + jnp.uint32(seed))) for seed in _SEEDS]
    rest = tuple(range(1, by_expert.ndim))
    return jnp.stack([jnp.sum(h, rest, dtype=jnp.uint32) for h in hashes], axis=1)


def _mixed(x: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer: a bijection of 32 bits in which every bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _fields(path: pathlib.Path, item: str) -> dict[str, Any]:
    try:
        return dict(json.loads((path / item / "metadata").read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{item}/metadata is no JSON object: {error}") from None


@contextlib.contextmanager
def _read_errors(path: pathlib.Path) -> Iterator[None]:
    """Raises DamagedCheckpointError for the errors of a file that is cut, changed or missing."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        code = re.match("([A-Z_]+): ", str(cause))
        if code and code[1] not in _DAMAGE:
            raise
        if isinstance(cause, OSError | MemoryError) and not isinstance(cause, FileNotFoundError):
            raise
        raise damaged(path, first_line(cause)) from error


def _difference(name: str, saved: list[str], found: list[str], experts: slice = slice(None)) -> str:
    """Describes which of the experts' fingerprints differ; empty if none do."""
    pairs = zip(range(len(saved))[experts], saved[experts], found, strict=True)
    differing = [expert for expert, before, after in pairs if before != after]
    return f"{name} is not what was saved, in experts {differing}" if differing else ""
