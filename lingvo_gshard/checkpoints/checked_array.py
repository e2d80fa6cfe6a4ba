"""Arrays that are read part by part, when they are indexed, and checked by their fingerprints.

An array is a view of TensorStore: of files, or of other views. TensorStore itself indexes,
transposes, stacks and concatenates views, and reads only the requested part.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorstore
from tensorstore import TensorStore

from lingvo_gshard.checkpoints.fingerprints import difference, of_values
from lingvo_gshard.files import finite
from lingvo_gshard.sharding.layout import TensorSpec

Index = tuple[slice, ...]
# The size of a part, which is read, hashed and written at once.
PART_BYTES = 64 * 2**20
# TensorStore's status codes for damaged files; others are errors of this machine.
_DAMAGE = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "INVALID_ARGUMENT", "FAILED_PRECONDITION")

# Holds small experts that were just checked, since their blocks and parts may be read one by one.
_CHECKED = tensorstore.Context({"cache_pool": {"total_bytes_limit": PART_BYTES}})


@dataclasses.dataclass(frozen=True)
class CheckedArray:
    """An array of a checkpoint or of weight files, read when it is indexed with slices.

    If it has fingerprints, reading a part reads and checks whole experts, with others that share a
    chunk of the files, or the whole array without a dim E. Reading raises the error that `damaged`
    makes if the array was changed, and ValueError if a weight is not finite.
    """

    name: str
    spec: TensorSpec
    open: Callable[[], TensorStore]  # Returns the unchecked view; called when it is first read.
    fingerprints: list[str] | None = None  # One for each expert, or only one, without E.
    damaged: Callable[[str], ValueError] = ValueError  # Makes the error, given the reason.
    source: str = "the weights"  # The folder or file, for errors.
    first_expert: int = 0  # The index of this array's first expert among the fingerprints.

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.spec.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @functools.cached_property
    def unchecked(self) -> TensorStore:
        """The view of the array, without a check."""
        with self._read_errors():
            return self.open()

    @functools.cached_property
    def checked(self) -> TensorStore:
        """The view of the array that checks each expert that it reads."""
        if self.fingerprints is None:
            return self.unchecked
        return computed_view(
            self._read_experts, self.shape, self.dtype, self._experts_shape(), _CHECKED
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[()]  # np.asarray calls this.

    def __getitem__(self, index: Index) -> np.ndarray:
        """Returns [index], checked; like NumPy's, it may omit the last dims.

        Raises the error that `damaged` makes, or ValueError if the part has numbers that are not
        finite.
        """
        index = whole_slices(index, self.shape)
        if self.fingerprints is not None and self._has_whole_chunks(index):
            # They are checked in the result itself, without a copy in the cache.
            shape = [len(range(size)[part]) for size, part in zip(self.shape, index, strict=True)]
            values = np.empty(shape, self.dtype)
            self._read_experts(index, values)
        else:
            with self._read_errors():
                values = self.checked[index].read().result()
        if is_weight(self.name):
            finite.check(self.source, {self.name: finite.num_not_finite(values)})
        return values

    def read_padded(self, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        """Returns [index] of the array that is padded by zeros to `shape`, unchecked."""
        with self._read_errors():
            view = self.unchecked
            if shape != self.shape:
                view = tensorstore.overlay([zeros(shape, self.dtype), view])
            return view[whole_slices(index, shape)].read().result()

    def indexed(self, expression: Any, dims: str | None = None) -> "CheckedArray":
        """Returns the array [expression], a part for example; `dims` are its dims if they differ.

        The expression is one of TensorStore's. Reading the result checks this array.
        """
        shape = tensorstore.IndexTransform(input_shape=self.shape)[expression].domain.shape
        return dataclasses.replace(
            self,
            spec=dataclasses.replace(
                self.spec, shape=shape, dims=self.spec.dims if dims is None else dims
            ),
            open=lambda: self.checked[expression].translate_to[0],
            fingerprints=None,
        )

    def experts(self, start: int, stop: int) -> "CheckedArray":
        """Returns the array of the experts start:stop, which has their fingerprints."""
        part = tensorstore.d[self._expert_axis][start:stop]
        shape = tensorstore.IndexTransform(input_shape=self.shape)[part].domain.shape
        return dataclasses.replace(
            self,
            spec=dataclasses.replace(self.spec, shape=shape),
            open=lambda: self.unchecked[part].translate_to[0],
            first_expert=self.first_expert + start,
        )

    def _has_whole_chunks(self, index: Index) -> bool:
        """Returns whether an index, a slice for each dim, cuts none of the chunks to be checked."""
        for part, size, chunk_size in zip(index, self.shape, self._experts_shape(), strict=True):
            if part.step != 1 or part.start >= part.stop:
                return False
            ends = [part.start] if part.stop == size else [part.start, part.stop]
            if any(end % chunk_size for end in ends):
                return False
        return True

    def _experts_shape(self) -> tuple[int, ...]:
        """Returns the shape to read and check at once: the experts of a chunk, or everything."""
        shape = list(self.shape)
        axis = self._expert_axis
        if axis >= 0:
            stored_shape = self.unchecked.chunk_layout.read_chunk.shape
            num_experts = stored_shape[axis] if stored_shape else None
            shape[axis] = min(num_experts or 1, shape[axis])
        return tuple(shape)

    @property
    def _expert_axis(self) -> int:
        # A lowercase letter is the same dim, in the optimizer.
        return self.spec.dims.upper().find("E")

    def _read_experts(self, index: Index, values: np.ndarray) -> None:
        """Reads whole experts into `values`; raises the error of `damaged` if they were changed."""
        assert self.fingerprints is not None
        with self._read_errors():
            tensorstore.array(values, copy=False).write(self.unchecked[index]).result()

        experts = slice(None)
        if self._expert_axis >= 0:
            own = index[self._expert_axis]
            experts = slice(self.first_expert + own.start, self.first_expert + own.stop)
        computed = of_values(values, self.spec.dims)
        reason = difference(self.name, self.fingerprints, computed, experts)
        if reason:
            raise self.damaged(reason)

    @contextlib.contextmanager
    def _read_errors(self) -> Iterator[None]:
        """Raises the error of `damaged` if TensorStore finds a damaged or missing file."""
        try:
            yield
        except Exception as error:
            status = re.match("([A-Z_]+): ", str(error))  # A message begins with its code.
            if status is None or status[1] not in _DAMAGE:
                raise
            raise self.damaged(first_line(error)) from error


def computed_view(
    compute: Callable[[Index, np.ndarray], None],
    shape: tuple[int, ...],
    dtype: Any,
    chunk_shape: tuple[int, ...] | None = None,
    cache: tensorstore.Context | None = None,
) -> TensorStore:
    """Returns a view of an array that is computed, chunk by chunk, when it is read.

    `compute` takes the chunk's index, a slice for each dim, and writes the chunk's values into an
    array. Another thread calls it for one chunk at a time, so that only one chunk is in memory
    besides the result. Reading raises the errors of `compute`. By default, the whole array is one
    chunk. With a `cache`, computed chunks stay in its pool for a while.
    """

    def fill(domain: tensorstore.IndexDomain, chunk: np.ndarray, _: Any) -> None:
        compute(domain.index_exp, chunk)

    # Each view has a thread of its own, since `compute` may wait for another view.
    context = tensorstore.Context({"data_copy_concurrency": {"limit": 1}}, cache)
    return tensorstore.virtual_chunked(
        fill,
        dtype=np.dtype(dtype),
        shape=shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk_shape or shape),
        context=context,
    )


def zeros(shape: tuple[int, ...], dtype: Any) -> TensorStore:
    """Returns a view of zeros, which take no memory until they are read."""
    return tensorstore.array(np.broadcast_to(np.zeros((), dtype), shape))


def mean(arrays: Sequence[CheckedArray]) -> CheckedArray:
    """Returns the mean of arrays of one shape and dtype, computed in float64.

    Reading it checks all arrays.
    """
    last = arrays[-1]

    def compute(index: Index, values: np.ndarray) -> None:
        total = np.zeros(values.shape, np.float64)
        for array in arrays:
            total += array.checked[index].read().result()
        total /= len(arrays)
        values[...] = total

    def open_view() -> TensorStore:
        return computed_view(compute, last.shape, last.dtype, last._experts_shape(), _CHECKED)

    return dataclasses.replace(last, fingerprints=None, open=open_view)


def part_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Returns the shape of a part: one expert in one block, which is cut if it is too large.

    It is cut along V if there is a vocabulary, else along its first dim.
    """
    shape = [
        1 if letter.upper() in ("R", "E") else size
        for letter, size in zip(spec.dims, spec.shape, strict=True)
    ]
    if not shape:
        return ()

    axis = spec.dims.upper().find("V")
    if axis < 0:
        axis = int(np.argmax(np.greater(shape, 1)))
    num_bytes = math.prod(shape) * np.dtype(spec.dtype).itemsize
    count = max(1, math.ceil(num_bytes / PART_BYTES))
    shape[axis] = math.ceil(shape[axis] / count)
    return tuple(shape)


def whole_slices(index: Index, shape: tuple[int, ...]) -> Index:
    """Completes an index: a slice for each dim, with numbers for its ends and its step.

    [2:] of shape (8, 4) is [2:8:1, 0:4:1].
    """
    missing = [slice(None)] * (len(shape) - len(index))
    pairs = zip((*index, *missing), shape, strict=True)
    return tuple(slice(*given.indices(size)) for given, size in pairs)


def is_weight(name: str) -> bool:
    """Returns whether an array is a weight or its moving average, by its dotted path."""
    return name.startswith(("theta.", "ema."))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, without TensorStore's specs."""
    line, _, _ = str(error).strip().partition("\n")
    line, _, _ = line.partition(" [tensorstore_spec")
    return line or repr(error)
