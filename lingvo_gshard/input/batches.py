"""The input of training and evaluation: packed batches of numpy arrays, read in the background."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import mixture, packing, prefetched, too_long
from lingvo_gshard.input.batching import Batching
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.one_pass import OnePassBatches
from lingvo_gshard.input.packing import Rows
from lingvo_gshard.input.prepared_input import PreparedInput
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.input.training_rows import TrainingBatches


class TranslationInput(PreparedInput):
    """An iterator of batches over a prepared data folder.

    A batch is a NestedMap of arrays [B, L], int32 except for float32 weights; see packing.py.

        features: source_ids, source_segment_ids, source_positions,
                  target_ids, target_segment_ids, target_positions
        labels:   target_labels, target_weights

    With `repeat` the stream is endless (training_rows.py), and examples that are too long for a row
    are left out; their share is printed, and bounded (too_long.py). Without it, every example of
    the split appears exactly once (one_pass.py), and rows of weight 0 fill up the last batch. With
    BUCKETED rows, batches of short pairs have shape [2B, L/2] or [4B, L/4], so that every batch
    has the same number of tokens.
    """

    KIND: ClassVar[Kind] = Kind.PARALLEL

    class Params(PreparedInput.Params):
        # The shape of a batch.
        source_len: int = setting(REQUIRED, "L of the source side, tokens per row.")
        target_len: int = setting(REQUIRED, "L of the target side, tokens per row.")
        max_too_long_share: float = setting(
            0.2,
            "The most pairs, as a share, that may be too long for a row, and so never trained on.",
        )

        # How often each example appears.
        temperature: float = setting(5.0, "T of the mixture: p_l is proportional to n_l**(1/T).")
        max_repeats: float | None = setting(
            20.0, "The most passes over a language during one pass over all; None sets no limit."
        )

        rows: Rows = setting(Rows.PACKED, "PACKED, SINGLE or, only for one pass, BUCKETED.")

    p: Params

    @classmethod
    def TooLong(cls, p: Params) -> Mapping[str, float]:
        """Returns, by language, the share of pairs in the split that are too long for a row."""
        data = cls.Manifest(p.data_dir)
        return too_long.too_long(p, mixture.languages_of(data, p.split, p.languages)).shares

    @staticmethod
    def batch_specs(p: Params) -> NestedMap:
        """Returns the TensorSpecs of a batch, from the settings alone, without any data."""
        shape = packing.RowShape(p.source_len, p.target_len)
        return packing.batch_specs(p.batch_size, shape)

    def __init__(self, params: Params, *, process_index: int = 0, num_processes: int = 1):
        """Checks the vocabularies, and the presence and the sizes of the record files.

        Each of n processes checks an n-th of these files and gets B/n rows of each batch. Raises
        ValueError if the folder is not a prepared one of pairs or is damaged, if it lacks the split
        or a language, if a size is below 1, if n processes cannot share the batches, or if too many
        pairs are too long for a row. Damage to a file of records is noticed when the file is first
        read.
        """
        p = params.Copy().Freeze()
        if p.repeat and p.rows is Rows.BUCKETED:
            raise ValueError("rows BUCKETED needs repeat=False: training batches have one shape")
        prefetched.check_share(p, num_processes)
        self.p = p

        shape = packing.RowShape(p.source_len, p.target_len)
        # The TensorSpecs of a batch with the rows of all processes, as the program expects it.
        self.specs = self.batch_specs(p)

        _, languages = self._checked_parts(p, process_index, num_processes)
        records = [language.records[p.split] for language in languages]
        source = RecordSource(p.data_dir, *records, hashed=p.hash_records)
        batching = Batching(source, p, shape, process_index, num_processes)
        batches = TrainingBatches(batching) if p.repeat else OnePassBatches(batching)
        too_long.check(p, languages)
        if p.repeat and process_index == 0:
            mixture.warn_of_limits(languages, source.sizes, p)
        self._batches = batches
        super().__init__(batches)

    def count_batches(self, limit: int | None) -> int | None:
        """Returns the number of batches, at most `limit`."""
        if isinstance(self._batches, OnePassBatches):
            return self._batches.count_batches(limit)
        return limit
