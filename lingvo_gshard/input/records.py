"""Reading records: random access to the examples of one file. For the bytes see example_codec."""

import pathlib

from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from lingvo_gshard.input import example_codec, manifest

# No readahead: a shuffled order gains nothing from the neighbours of a record.
_READER_OPTIONS = "readahead_buffer_size:0"
_READER_BUFFER_BYTES = 1 << 15


class RecordSource:
    """The examples of one split of one language, by index; a data source for Grain."""

    def __init__(self, data_dir: str | pathlib.Path, records: manifest.Records):
        """Opens the file. Raises ValueError if it holds another number of records."""
        self._path = pathlib.Path(data_dir, records.file.path)
        self._reader = array_record_module.ArrayRecordReader(
            str(self._path),
            options=_READER_OPTIONS,
            file_reader_buffer_size=_READER_BUFFER_BYTES,
        )
        self._num_examples = self._reader.num_records()
        if self._num_examples != records.num_examples:
            raise ValueError(
                f"{self._path} holds {self._num_examples} records, "
                f"the manifest says {records.num_examples}"
            )

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> example_codec.Example:
        """Reads one example. Raises IndexError outside [0, len)."""
        if not 0 <= index < self._num_examples:
            raise IndexError(f"{self._path}: no record {index} of {self._num_examples}")
        return example_codec.decode(self._reader.read([int(index)])[0])

    def __repr__(self) -> str:
        return f"RecordSource({self._path})"
