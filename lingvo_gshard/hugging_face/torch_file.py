"""Reads the tensors' places in a file that torch.save wrote, pytorch_model.bin, without torch.

Such a file is a zip archive. NAME/data.pkl is a pickle of a dict from names to tensors, each of
which names a storage, and NAME/data/KEY has the uncompressed bytes of a storage.

A pickle can call any function, so only the opcodes and classes that tensors need are accepted: a
dict, a tensor and the names of dtypes. The tensors themselves are not read here.
"""

import dataclasses
import io
import math
import pathlib
import pickle
import pickletools
import struct
import zipfile
import zlib
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by name from it)
import numpy as np

from lingvo_gshard.files.tensor_span import TensorSpan

_MAX_PICKLE_BYTES = 64 * 2**20  # A part with all experts of NLLB-MoE has a hundredth of that.
_DTYPES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
}
_OPCODES = frozenset(
    "PROTO FRAME STOP MARK POP MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID PUT BINPUT "
    "LONG_BINPUT GET BINGET LONG_BINGET EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINUNICODE SHORT_BINUNICODE".split()
)
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
# Opcodes whose result is not a tuple.
_NO_TUPLES = ("GLOBAL", "STACK_GLOBAL", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT", "REDUCE")
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # The header of an entry in a zip archive.


def spans(path: str | pathlib.Path) -> dict[str, TensorSpan]:
    """Returns the place of each tensor in a file, by name.

    Its digest is the archive's CRC-32. Raises ValueError if the file is missing, damaged, has an
    older format, or holds other objects than tensors.
    """
    path = pathlib.Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return _Unpickler(path, archive).spans()
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing.") from error
    except (
        OSError,
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        RuntimeError,  # An archive with a password, or of a kind that zipfile cannot read.
        TypeError,
        ValueError,
        pickle.UnpicklingError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(
            f"{path}: not a file of tensors that torch.save wrote, or a damaged one ({error!r})."
        ) from error


class _Dict(dict):
    """An OrderedDict of the pickle, without its attributes."""

    def __setstate__(self, state: Any) -> None:
        """Ignores the attributes, which torch adds to the tensors."""


@dataclasses.dataclass(frozen=True)
class _Storage:
    """The bytes of a storage in the file."""

    offset: int
    size: int  # In elements.
    dtype: np.dtype
    crc32: int


class _Unpickler(pickle.Unpickler):
    """Creates the TensorSpans of an open archive, and refuses everything else."""

    def __init__(self, path: pathlib.Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} entries data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        self._content = self._read(pickles[0])
        super().__init__(io.BytesIO(self._content))

    def spans(self) -> dict[str, TensorSpan]:
        """Returns the tensors' places."""
        byteorder = f"{self._root}byteorder"
        if byteorder in self._archive.namelist() and self._read(byteorder) != b"little":
            raise ValueError("its bytes are not in little-endian order")

        _check_opcodes(self._content)
        tensors = self.load()
        if not all(isinstance(tensor, TensorSpan) for tensor in tensors.values()):
            raise ValueError("it holds other things than tensors")
        return dict(tensors)

    def _read(self, name: str) -> bytes:
        info = self._archive.getinfo(name)
        if info.file_size > _MAX_PICKLE_BYTES:
            raise ValueError(f"{name} has {info.file_size} bytes")
        return self._archive.read(info)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if module == "torch" and name in _DTYPES:
            return np.dtype(_DTYPES[name])
        raise ValueError(f"it holds {module}.{name}, which is not a tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid
        types = isinstance(dtype, np.dtype), isinstance(key, str), isinstance(count, int)
        if kind != "storage" or not all(types):
            raise ValueError("it refers to something that is not a storage")

        # The entry's name and extra field are between its header and its bytes.
        info = self._archive.getinfo(f"{self._root}data/{key}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"data/{key} is compressed")
        with self._path.open("rb") as file:
            file.seek(info.header_offset)
            header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        offset = info.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]

        ends_in_file = offset + info.file_size <= self._path.stat().st_size
        if count * dtype.itemsize != info.file_size or not ends_in_file:
            raise ValueError(f"data/{key} has {info.file_size} bytes for {count} of {dtype}")
        return _Storage(offset, count, dtype, info.CRC)

    def _tensor(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,
    ) -> TensorSpan:
        """Returns the place of the tensor that torch._utils._rebuild_tensor_v2 would return."""
        if not all(isinstance(number, int) for number in (offset, *shape, *stride)):
            raise ValueError("a tensor's offset or shape is not a number")
        if min(offset, *shape, 0) < 0 or offset + math.prod(shape) > storage.size:
            raise ValueError(f"a tensor of shape {shape} at {offset} in {storage.size} elements")
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        is_row_major = all(
            own == expected or size == 1
            for own, expected, size in zip(stride, strides, shape, strict=True)
        )
        if not is_row_major:
            raise ValueError(f"a tensor of shape {shape} has strides {stride}")

        # A view has only a part of its storage, whose checksum is of the whole.
        is_whole = math.prod(shape) == storage.size
        digest = f"crc32:{storage.crc32:08x}" if is_whole else None
        begin = storage.offset + offset * storage.dtype.itemsize
        return TensorSpan(self._path, begin, storage.dtype, tuple(shape), digest)


def _check_opcodes(content: bytes) -> None:
    """Raises ValueError unless a pickle has only opcodes of tensors, which take little memory."""
    indices: set[int] = set()  # The indices of all objects that were put.
    tuples: set[int] = set()  # The indices of objects that may be tuples.
    previous = ""
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name not in _OPCODES:
            raise ValueError(f"its pickle has the opcode {name}")

        if name in _PUTS:
            # The unpickler's list of objects grows to this index.
            index = len(indices) if name == "MEMOIZE" else argument
            if not isinstance(index, int) or index > len(indices):
                raise ValueError(f"its pickle has the index {index}")
            indices.add(index)
            if previous not in _NO_TUPLES:
                tuples.add(index)

        # Tuples that each hold the previous one twice would take forever to hash.
        if name in _GETS and argument in tuples:
            raise ValueError("its pickle has a tuple in several places")
        previous = name
