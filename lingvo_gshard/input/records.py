"""Random access to prepared examples by index. example_codec describes a record's bytes."""

import functools
import pathlib
from collections.abc import Sequence

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from lingvo_gshard.input import example_codec, manifest
from lingvo_gshard.input.example_codec import Example

# No readahead and no threads: a shuffled order gains nothing from a record's neighbours, and
# handing a few records from thread to thread takes longer than reading them. A file is opened by
# reading its end, which holds the index; by default that would be the last MiB.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0,footer_prefetch_bytes:80K"
_READER_BUFFER_BYTES = 1 << 15
# Of one source. An open file keeps 8 bytes a record in memory.
_MAX_OPEN_FILES = 256


class RecordSource:
    """The examples of a split of some languages, `sizes` of each, indexed over all their files."""

    def __init__(self, data_dir: str | pathlib.Path, *records: manifest.Records):
        """Opens no file yet. A file is opened to read from it, and those used last stay open."""
        self._data_dir = str(data_dir)
        self.sizes = [one.num_examples for one in records]
        self._shards = [shard for one in records for shard in one.shards]
        self._ends = np.cumsum([shard.num_examples for shard in self._shards])
        self._reader = functools.lru_cache(_MAX_OPEN_FILES)(_open)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> list[Example]:
        """The examples at int [n] indices, reading each file once; ValueError if one is damaged."""
        found = np.empty(len(indices), object)
        shard_of = np.searchsorted(self._ends, indices, side="right")
        by_shard = np.argsort(shard_of, kind="stable")
        numbers, starts = np.unique(shard_of[by_shard], return_index=True)
        parts = np.split(by_shard, starts[1:])  # One empty part if there are no indices.
        for number, members in zip(numbers.tolist(), parts, strict=False):
            start = self._ends[number] - self._shards[number].num_examples
            found[members] = self._read_shard(self._shards[number], indices[members] - start)
        return found.tolist()

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Int [len, 2]: the tokens of each source and target. Raises as manifest.verify."""
        files = [shard.lengths for shard in self._shards]
        manifest.verify(self._data_dir, files)
        return np.concatenate([np.load(f"{self._data_dir}/{file.path}") for file in files])

    def _read_shard(self, shard: manifest.Shard, indices: np.ndarray) -> Sequence[Example]:
        path = f"{self._data_dir}/{shard.file.path}"
        try:
            records = self._reader(path, shard.num_examples).read(indices.tolist())
            return [example_codec.decode(record) for record in records]
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def _open(path: str, num_records: int) -> array_record_module.ArrayRecordReader:
    reader = array_record_module.ArrayRecordReader(
        path, options=_READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER_BYTES
    )
    if not reader.ok():
        reader.close()  # Raises the reason.
    if reader.num_records() != num_records:
        raise ValueError(f"holds {reader.num_records()} records, the manifest says {num_records}")
    return reader
