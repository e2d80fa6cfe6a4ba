"""The inputs for making batches, whether endless or in one pass."""

import dataclasses

from lingvo_gshard.core.hyperparams import AnyParams
from lingvo_gshard.input.packing import RowShape
from lingvo_gshard.input.records import RecordSource


@dataclasses.dataclass(frozen=True)
class Batching:
    """The examples, the settings of TranslationInput, and the share of a process.

    Each of `num_processes` makes an equal part of the rows of every batch.
    """

    source: RecordSource
    params: AnyParams
    shape: RowShape  # The shape of the longest rows.
    process_index: int
    num_processes: int
