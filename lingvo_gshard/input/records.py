"""Reading records: random access to a language's examples. For the bytes see example_codec."""

import functools
import pathlib
from collections.abc import Sequence

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from lingvo_gshard.input import example_codec, manifest
from lingvo_gshard.input.example_codec import Example

# No readahead and no threads: a shuffled order gains nothing from the neighbours of a record, and
# handing a few records from thread to thread takes longer than reading them.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_READER_BUFFER_BYTES = 1 << 15


class RecordSource:
    """The examples of one split of one language, by index over all its files."""

    def __init__(self, data_dir: str | pathlib.Path, records: manifest.Records):
        """Opens nothing yet: of many files, few are read at a time."""
        self._shards = [
            _Shard(pathlib.Path(data_dir, shard.file.path), shard.num_examples)
            for shard in records.shards
        ]
        self._lengths_paths = [
            pathlib.Path(data_dir, shard.lengths.path) for shard in records.shards
        ]
        self._ends = np.cumsum([shard.num_examples for shard in records.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Example:
        """Reads one example. Raises as `read`."""
        return self.read(np.array([index]))[0]

    def read(self, indices: np.ndarray) -> list[Example]:
        """Reads the examples of int [n], in their order, all those of a file at once.

        Raises:
            IndexError: an index outside [0, len).
            ValueError: a file holds another number of records than it should, or damaged ones.
        """
        outside = indices[(indices < 0) | (indices >= len(self))]
        if len(outside):
            raise IndexError(f"{self}: no record {outside[0]} of {len(self)}")
        found: dict[int, Example] = {}
        shard_of = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(shard_of):
            places = np.flatnonzero(shard_of == number)
            shard = self._shards[number]
            start = self._ends[number] - shard.num_examples
            examples = shard.read(indices[places] - start)
            found |= dict(zip(places.tolist(), examples, strict=True))
        return [found[place] for place in range(len(indices))]

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Int [len, 2], tokens of each example's source and target; no record is read for it."""
        return np.concatenate([np.load(path) for path in self._lengths_paths])

    def __repr__(self) -> str:
        return f"RecordSource({self._shards[0].path}, {len(self._shards)} files)"


class _Shard:
    """One file, opened when it is first read."""

    def __init__(self, path: pathlib.Path, num_examples: int) -> None:
        self.path, self.num_examples = path, num_examples

    def read(self, indices: np.ndarray) -> Sequence[Example]:
        try:
            return [example_codec.decode(one) for one in self._reader.read(indices.tolist())]
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{self.path}: {error}") from error

    @functools.cached_property
    def _reader(self) -> array_record_module.ArrayRecordReader:
        reader = array_record_module.ArrayRecordReader(
            str(self.path),
            options=_READER_OPTIONS,
            file_reader_buffer_size=_READER_BUFFER_BYTES,
        )
        if reader.num_records() != self.num_examples:
            raise ValueError(
                f"holds {reader.num_records()} records, the manifest says {self.num_examples}"
            )
        return reader
