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

    Raises:
        OSError: the file cannot be written; names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    writer = array_record_module.ArrayRecordWriter(str(unfinished), _WRITER_OPTIONS)
    num_records = 0
    for record in records:
        writer.write(record)
        num_records += 1
    try:
        writer.close()
    except RuntimeError as error:  # So the library tells of a full disk, and not before.
        raise OSError(str(error)) from error
    os.replace(unfinished, path)
    return num_records
