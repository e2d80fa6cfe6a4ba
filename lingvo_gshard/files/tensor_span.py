"""A tensor as a range of bytes in a file, of which any rows can be read.

Files are opened for each read and never mapped: pages of a mapped file would count as this
process's memory until the system reclaims them.
"""

import dataclasses
import hashlib
import math
import pathlib
import zlib
from collections.abc import Iterator

import numpy as np

_PART_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class TensorSpan:
    """A tensor's place in a file, in row-major order."""

    path: pathlib.Path
    offset: int  # In bytes.
    dtype: np.dtype
    shape: tuple[int, ...]
    digest: str | None = None  # `sha256:HEX` or `crc32:HEX` of its bytes, if the file has one.

    @property
    def num_bytes(self) -> int:
        """The tensor's size."""
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns rows [start:stop] of the tensor, by default all of them.

        Raises ValueError if the file is cut short.
        """
        if not self.shape:
            return self._elements(0, 1).reshape(())
        stop = self.shape[0] if stop is None else stop
        row = math.prod(self.shape[1:])
        elements = self._elements(start * row, (stop - start) * row)
        return elements.reshape((stop - start, *self.shape[1:]))

    def is_equal(self, other: "TensorSpan") -> bool:
        """Returns whether another tensor has the same dtype, shape and bytes."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        if (self.path, self.offset) == (other.path, other.offset):
            return True
        return self._sha256() == other._sha256()

    def check(self) -> None:
        """Raises ValueError if there is a digest and the bytes do not match it."""
        if self.digest is None:
            return
        kind, _, expected = self.digest.partition(":")

        if kind == "crc32":
            checksum = 0
            for part in self._parts():
                checksum = zlib.crc32(part, checksum)
            computed = f"{checksum:08x}"
        else:
            computed = self._sha256()

        if computed != expected:
            raise ValueError(
                f"{self.path} is damaged: the tensor at byte {self.offset} does not match its "
                "digest."
            )

    def _sha256(self) -> str:
        sha256 = hashlib.sha256()
        for part in self._parts():
            sha256.update(part)
        return sha256.hexdigest()

    def _elements(self, first: int, count: int) -> np.ndarray:
        offset = self.offset + first * self.dtype.itemsize
        with self.path.open("rb") as file:
            elements = np.fromfile(file, self.dtype, count, offset=offset)
        if len(elements) != count:
            raise ValueError(f"{self.path} is damaged: it ends too early.")
        return elements

    def _parts(self) -> Iterator[bytes]:
        """Yields all bytes in parts of limited size."""
        remaining = self.num_bytes
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while remaining > 0:
                part = file.read(min(remaining, _PART_BYTES))
                if not part:
                    raise ValueError(f"{self.path} is damaged: it ends too early.")
                yield part
                remaining -= len(part)
