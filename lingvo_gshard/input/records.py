"""Random access to prepared examples by index. example_codec describes a record's bytes."""

import functools
import pathlib
from collections.abc import Sequence

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from lingvo_gshard.input import example_codec, manifest
from lingvo_gshard.input.example_codec import Example

# No readahead and no threads: a shuffled order gains nothing from a record's neighbours, and
# handing a few records from thread to thread takes longer than reading them.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READER_BUFFER_BYTES = 1 << 15


class RecordSource:
    """The examples of one split of one or more languages, indexed over all their files."""

    def __init__(self, data_dir: str | pathlib.Path, *records: manifest.Records):
        """Opens no file yet: each is opened when an example of it is first read."""
        self._data_dir = pathlib.Path(data_dir)
        self._shards = [shard for one in records for shard in one.shards]
        self._ends = np.cumsum([shard.num_examples for shard in self._shards])
        self._readers: dict[int, array_record_module.ArrayRecordReader] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Example:
        """Reads one example."""
        return self.read(np.array([index]))[0]

    def read(self, indices: np.ndarray) -> list[Example]:
        """The examples at int [n] indices, in their order; reads each file once.

        Raises ValueError if a file is damaged or does not hold as many records as the manifest
        says.
        """
        found = np.empty(len(indices), object)
        shard_of = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(shard_of):
            in_shard = shard_of == number
            start = self._ends[number] - self._shards[number].num_examples
            found[in_shard] = self._read_shard(int(number), indices[in_shard] - start)
        return found.tolist()

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Int [len, 2]: the tokens of each source and target, without reading any record."""
        return np.concatenate([np.load(self._data_dir / s.lengths.path) for s in self._shards])

    def _read_shard(self, number: int, indices: np.ndarray) -> Sequence[Example]:
        try:
            records = self._reader(number).read(indices.tolist())
            return [example_codec.decode(record) for record in records]
        except (RuntimeError, ValueError) as error:
            path = self._data_dir / self._shards[number].file.path
            raise ValueError(f"{path}: {error}") from error

    def _reader(self, number: int) -> array_record_module.ArrayRecordReader:
        if number not in self._readers:
            shard = self._shards[number]
            reader = array_record_module.ArrayRecordReader(
                str(self._data_dir / shard.file.path),
                options=_READER_OPTIONS,
                file_reader_buffer_size=_READER_BUFFER_BYTES,
            )
            if reader.num_records() != shard.num_examples:
                raise ValueError(
                    f"holds {reader.num_records()} records, the manifest says {shard.num_examples}"
                )
            self._readers[number] = reader
        return self._readers[number]
