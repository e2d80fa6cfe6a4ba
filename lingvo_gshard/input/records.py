"""Random access to prepared examples by index. example_codec describes a record's bytes."""

import contextlib
import functools
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from lingvo_gshard.input import example_codec, manifest
from lingvo_gshard.input.example_codec import Example
from xla_spmd.files import digests

# Without readahead or threads: a shuffled order gains nothing from a record's neighbors, and
# passing a few records between threads takes longer than reading them. Opening a file reads its
# end, which contains the index; by default, that would be the last MiB.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0,footer_prefetch_bytes:80K"
_READER_BUFFER_BYTES = 1 << 15
# The most open files of one RecordSource. An open file takes 8 bytes of memory per record.
_MAX_OPEN_FILES = 256


def read_lengths(data_dir: str | pathlib.Path, shards: Sequence[manifest.Shard]) -> np.ndarray:
    """Returns the number of tokens of each source and target in some shards, int [n, 2].

    Raises ValueError if a file of lengths is missing or damaged.
    """
    files = [shard.lengths for shard in shards]
    digests.verify(data_dir, files)
    return np.concatenate([np.load(digests.local(data_dir, file)) for file in files])


class RecordSource:
    """The examples of some languages' split; `sizes` has their counts, and indices run over all."""

    def __init__(
        self, data_dir: str | pathlib.Path, *records: manifest.Records, hashed: bool = True
    ):
        """Does not open files yet. They are opened to read from them, and recent ones stay open.

        If `hashed`, a file's hash is checked when it is first opened. Its size is always checked,
        and each record when it is read.
        """
        self._data_dir = str(data_dir)
        self.sizes = [of_language.num_examples for of_language in records]
        self._shards: list[manifest.Shard] = []
        for of_language in records:
            self._shards += of_language.shards
        # The index after the last example of each shard.
        self._ends = np.cumsum([shard.num_examples for shard in self._shards])

        open_shard = functools.partial(_open, self._data_dir, hashed)
        self._reader = functools.lru_cache(_MAX_OPEN_FILES)(open_shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> list[Example]:
        """Returns the examples at int [n] indices, in their order. Each file is read once.

        Raises ValueError if a file with one of them is missing or damaged.
        """
        shard_numbers = np.searchsorted(self._ends, indices, side="right")
        # A shuffled order may return to a file often, so each file's records are read together.
        examples = np.empty(len(indices), object)
        for shard_number in np.unique(shard_numbers).tolist():
            shard = self._shards[shard_number]
            is_in_shard = shard_numbers == shard_number
            start = self._ends[shard_number] - shard.num_examples
            inside = (indices[is_in_shard] - start).tolist()

            reader = self._reader(shard)
            with _naming(f"{self._data_dir}/{shard.file.path}"):
                records = reader.read(inside)
                examples[is_in_shard] = [example_codec.decode(record) for record in records]
        return examples.tolist()

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each source and target, int [len, 2].

        Raises ValueError if a file of lengths is missing or damaged.
        """
        # Small compared with the records, so all are read when they are first needed.
        return read_lengths(self._data_dir, self._shards)


def _open(
    data_dir: str, hashed: bool, shard: manifest.Shard
) -> array_record_module.ArrayRecordReader:
    """Opens a shard's file of records. Raises ValueError if it is damaged."""
    digests.verify(data_dir, [shard.file], contents=hashed)
    path = str(digests.local(data_dir, shard.file))
    with _naming(path):
        reader = array_record_module.ArrayRecordReader(
            path, options=_READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER_BYTES
        )
        if not reader.ok():
            reader.close()  # Raises the reason.

        num_records = reader.num_records()
        if num_records != shard.num_examples:
            raise ValueError(f"has {num_records} records, the manifest {shard.num_examples}")
        return reader


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turns the library's errors into a ValueError that names the file."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
