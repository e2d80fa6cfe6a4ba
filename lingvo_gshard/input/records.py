"""Random access to prepared examples by index. example_codec describes a record's bytes."""

import contextlib
import functools
import pathlib
from collections.abc import Iterator

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from lingvo_gshard.files import digests
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

    def __init__(
        self, data_dir: str | pathlib.Path, *records: manifest.Records, hashed: bool = True
    ):
        """Opens no file yet. A file is opened to read from it, and those used last stay open.

        If `hashed`, a file's hash is checked when it is first opened. Its size always is, and each
        record when it is read.
        """
        self._data_dir = str(data_dir)
        self.sizes = [one.num_examples for one in records]
        self._shards = [shard for one in records for shard in one.shards]
        self._ends = np.cumsum([shard.num_examples for shard in self._shards])
        how = self._data_dir, hashed
        self._reader = functools.lru_cache(_MAX_OPEN_FILES)(functools.partial(_open, *how))

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
            shard = self._shards[number]
            inside = indices[members] - (self._ends[number] - shard.num_examples)
            reader = self._reader(shard)
            with _naming(f"{self._data_dir}/{shard.file.path}"):
                found[members] = [*map(example_codec.decode, reader.read(inside.tolist()))]
        return found.tolist()

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Int [len, 2]: the tokens of each source and target. Raises as digests.verify."""
        files = [shard.lengths for shard in self._shards]
        digests.verify(self._data_dir, files)
        return np.concatenate([np.load(digests.local(self._data_dir, file)) for file in files])


def _open(
    data_dir: str, hashed: bool, shard: manifest.Shard
) -> array_record_module.ArrayRecordReader:
    digests.verify(data_dir, [shard.file], contents=hashed)
    path = str(digests.local(data_dir, shard.file))
    with _naming(path):
        reader = array_record_module.ArrayRecordReader(
            path, options=_READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER_BYTES
        )
        if not reader.ok():
            reader.close()  # Raises the reason.
        if (found := reader.num_records()) != shard.num_examples:
            raise ValueError(f"holds {found} records, the manifest says {shard.num_examples}")
        return reader


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Raises the library's errors as a ValueError that names the file."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
