"""The input of training and evaluation: packed batches of numpy arrays, read in the background."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.late import grain
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import digests
from lingvo_gshard.input import manifest, mixture, packing
from lingvo_gshard.input.batching import Batching
from lingvo_gshard.input.one_pass import OnePassBatches
from lingvo_gshard.input.packing import Rows
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.input.training_rows import TrainingBatches

_PREFETCHED_BATCHES = 4  # Read while the device computes.
_TOLD_LANGUAGES = 5  # In a warning.


class TranslationInput:
    """An iterator of batches over a prepared data folder.

    A batch is a NestedMap of int32 arrays [B, L], but float32 weights, as packing.py shows.

        features: source_ids, source_segment_ids, source_positions,
                  target_ids, target_segment_ids, target_positions
        labels:   target_labels, target_weights

    With `repeat` the stream is endless (training_rows.py), and examples that are too long for a row
    are left out. Without it, every example of the split appears exactly once (one_pass.py), and
    rows of weight 0 fill up the last batch. With BUCKETED rows, batches of short pairs have shape
    [2B, L/2] or [4B, L/4], so that every batch holds the same number of tokens.
    """

    @classmethod
    def Params(cls) -> hyperparams.InstantiableParams:
        """Returns the input's hyperparameters."""
        p = hyperparams.InstantiableParams(cls)
        p.Define("data_dir", hyperparams.REQUIRED, "A folder that data_prep.build prepared.")

        # The shape of a batch.
        p.Define("batch_size", hyperparams.REQUIRED, "B, rows per batch, over all processes.")
        p.Define("source_len", hyperparams.REQUIRED, "L of the source side, tokens per row.")
        p.Define("target_len", hyperparams.REQUIRED, "L of the target side, tokens per row.")

        # The examples, and how often each comes.
        p.Define("split", "train", "train, dev or test.")
        p.Define("languages", None, "Language codes; None for all of the split.", optional=tuple)
        p.Define("temperature", 5.0, "T of the mixture: p_l is proportional to n_l**(1/T).")
        p.Define(
            "max_repeats",
            20.0,
            "The most passes over a language in one pass over all of them; None for any number.",
            optional=float,
        )

        # Their order, and their place in the rows.
        p.Define("repeat", True, "Endless and mixed, or one pass over all languages in turn.")
        p.Define("shuffle", True, "Shuffle the examples and the rows.")
        p.Define("rows", Rows.PACKED, "PACKED, SINGLE or, for one pass only, BUCKETED.")

        p.Define(
            "hash_records",
            True,
            "Check the hash of each file of records when it is first read, by each process.",
        )
        p.Define("seed", 1, "Seed of the mixture and the shuffles.")
        return p

    @staticmethod
    def batch_specs(p: hyperparams.Params) -> NestedMap:
        """Returns the TensorSpecs of a batch by the settings alone, without any data."""
        shape = packing.RowShape(p.source_len, p.target_len)
        return packing.batch_specs(p.batch_size, shape)

    def __init__(
        self, params: hyperparams.Params, *, process_index: int = 0, num_processes: int = 1
    ):
        """Checks the vocabularies, and that the record files are there with the right sizes.

        Each of n processes checks an n-th of these files and gets B/n rows of each batch. Raises
        ValueError if the folder is not a prepared one or is damaged, if it lacks the split or a
        language, if a size is below 1, or if n processes cannot share the batches. Damage to a
        file of records is noticed when the file is first read.
        """
        p = params.Copy().Freeze()
        _check_settings(p, num_processes)
        self.p = p

        shape = packing.RowShape(p.source_len, p.target_len)
        # The TensorSpecs of a batch of all processes, as the program takes it.
        self.specs = self.batch_specs(p)

        # Sizes are checked now, each process an n-th of them; contents, when a file is first read.
        data = manifest.load(p.data_dir)
        languages = mixture.languages_of(data, p.split, p.languages)
        records = [language.records[p.split] for language in languages]
        files: list[digests.File] = []
        for of_language in records:
            files += [shard.file for shard in of_language.shards]
        digests.verify(p.data_dir, data.vocabulary_files)
        digests.verify(p.data_dir, files[process_index::num_processes], contents=False)

        source = RecordSource(p.data_dir, *records, hashed=p.hash_records)
        batching = Batching(source, p, shape, process_index, num_processes)
        batches = TrainingBatches(batching) if p.repeat else OnePassBatches(batching)
        if p.repeat and process_index == 0:
            _warn_of_limits(languages, p)
        self._iterator = _prefetched(batches)
        # Grain's own clean-up at exit runs after modules that it uses have been unloaded.
        self._close = weakref.finalize(self, self._iterator.close)

    def __iter__(self) -> TranslationInput:
        return self

    def __next__(self) -> NestedMap:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch, JSON-able and the same in all processes."""
        return dict(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues, bit for bit, where `get_state` returned `state`.

        Raises ValueError if `state` is not that of an input.
        """
        # Grain would take another dict, and continue somewhere else.
        expected = sorted(self.get_state())
        if sorted(state) != expected:
            raise ValueError(f"input state has {sorted(state)}, expected {expected}")
        self._iterator.set_state({name: int(value) for name, value in state.items()})

    def close(self) -> None:
        """Stops the prefetch thread."""
        self._close()


def _warn_of_limits(languages: Sequence[manifest.Language], p: hyperparams.Params) -> None:
    """Logs which languages are drawn less often than the temperature wants, if any are."""
    limited = mixture.limited_languages(languages, p)
    if limited:
        logging.warning(
            "max_repeats %g limits %d of %d languages, which temperature %g would repeat more "
            "often; the smallest: %s. None removes the limit.",
            p.max_repeats,
            len(limited),
            len(languages),
            p.temperature,
            ", ".join(limited[:_TOLD_LANGUAGES]),
        )


def _check_settings(p: hyperparams.Params, num_processes: int) -> None:
    """Raises ValueError for settings that make no batches."""
    if p.repeat and p.rows is Rows.BUCKETED:
        raise ValueError("rows BUCKETED needs repeat=False: training batches have one shape")
    if p.batch_size < 1:
        raise ValueError(f"batch_size {p.batch_size}: expected at least 1")
    if p.seed < 0:
        raise ValueError(f"seed {p.seed}: expected at least 0")
    if p.batch_size % num_processes != 0:
        raise ValueError(
            f"num_processes {num_processes}: expected a divisor of batch_size {p.batch_size}"
        )


def _prefetched(batches: TrainingBatches | OnePassBatches) -> Any:
    """Returns Grain's iterator over batches, which reads a few of them ahead."""
    # The prefetch thread reads; Grain's own readers would add more threads.
    one_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.MapDataset.source(batches).to_iter_dataset(one_thread)
    prefetched = grain.experimental.ThreadPrefetchIterDataset(
        dataset, prefetch_buffer_size=_PREFETCHED_BATCHES
    )
    return iter(prefetched)
