"""Writing ArrayRecord files of token ids."""

import dataclasses
import pathlib
from collections.abc import Iterable

from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from lingvo_gshard.input import example_codec

# One record a group, so that any record can be read alone. Ids hardly compress one at a time.
_WRITER_OPTIONS = "group_size:1,uncompressed"


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a file holds; tokens include EOS."""

    num_examples: int
    num_source_tokens: int
    num_target_tokens: int


def write(path: pathlib.Path, examples: Iterable[tuple[list[int], list[int]]]) -> Counts:
    """Writes (source ids, target ids), EOS included, in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    num_examples = num_source_tokens = num_target_tokens = 0
    writer = array_record_module.ArrayRecordWriter(str(path), _WRITER_OPTIONS)
    try:
        for source_ids, target_ids in examples:
            writer.write(example_codec.encode(source_ids, target_ids))
            num_examples += 1
            num_source_tokens += len(source_ids)
            num_target_tokens += len(target_ids)
    finally:
        writer.close()
    return Counts(num_examples, num_source_tokens, num_target_tokens)
