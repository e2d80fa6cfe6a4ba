"""Writing ArrayRecord files of token ids."""

import os
import pathlib
from collections.abc import Iterable

from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

# One record a group, so that any record can be read alone. Ids hardly compress one at a time.
_WRITER_OPTIONS = "group_size:1,uncompressed"


def write(path: pathlib.Path, records: Iterable[bytes]) -> int:
    """Writes the bytes of records (example_codec.py), the whole file or nothing; returns how many.

    A process that is killed leaves its unfinished file, which the next one writes over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    num_records = 0
    writer = array_record_module.ArrayRecordWriter(str(unfinished), _WRITER_OPTIONS)
    try:
        for record in records:
            writer.write(record)
            num_records += 1
    finally:
        writer.close()
    os.replace(unfinished, path)
    return num_records
