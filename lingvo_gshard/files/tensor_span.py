"""A tensor as a range of bytes in a file, of which any rows can be read.

Files are opened for each reading and mapped never: pages of a mapped file would count as this
process's memory until the system takes them back.
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
        """Returns its size."""
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns rows [start:stop] of a tensor, by default the whole one.

        Raises ValueError if the file is cut short.
        """
        if not self.shape:
            return self._elements(0, 1).reshape(())
        stop = self.shape[0] if stop is None else stop
        row = math.prod(self.shape[1:])
        elements = self._elements(start * row, (stop - start) * row)
        return elements.reshape((stop - start, *self.shape[1:]))

    def check(self) -> None:
        """Raises ValueError unless the bytes have the digest, if there is one."""
        if self.digest is None:
            return
        kind, _, expected = self.digest.partition(":")

        if kind == "crc32":
            checksum = 0
            for part in self._parts():
                checksum = zlib.crc32(part, checksum)
            computed = f"{checksum:08x}"
        else:
            sha256 = hashlib.sha256()
            for part in self._parts():
                sha256.update(part)
            computed = sha256.hexdigest()

        if computed != expected:
            raise ValueError(
                f"{self.path} is damaged: the tensor at byte {self.offset} is not what was written."
            )

    def _elements(self, first: int, count: int) -> np.ndarray:
        offset = self.offset + first * self.dtype.itemsize
        with self.path.open("rb") as file:
            elements = np.fromfile(file, self.dtype, count, offset=offset)
        if len(elements) != count:
            raise ValueError(f"{self.path} is damaged: it ends too early.")
        return elements

    def _parts(self) -> Iterator[bytes]:
        """Yields all bytes, a part at a time."""
        remaining = self.num_bytes
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while remaining > 0:
                part = file.read(min(remaining, _PART_BYTES))
                if not part:
                    raise ValueError(f"{self.path} is damaged: it ends too early.")
                yield part
                remaining -= len(part)
