"""The input of training and evaluation: packed batches of numpy arrays, in the background.

examples (mixture.py) -> rows -> batches (training_rows.py; one_pass_rows.py or bucketed_rows.py)
-> prefetch thread
"""

import math
import weakref
from typing import Any

import grain.python as grain
from grain import experimental as grain_experimental

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import (
    bucketed_rows,
    manifest,
    mixture,
    one_pass_rows,
    packing,
    training_rows,
)
from lingvo_gshard.input.packing import Rows
from lingvo_gshard.input.records import RecordSource

_PREFETCHED_BATCHES = 4
_LANES = 8


class TranslationInput:
    """An iterator of batches over a prepared data folder.

    A batch is a NestedMap, all [B, L], int32 but for target_weights (float32); see packing.py for
    an example:

        features: source_ids, source_segment_ids, source_positions,
                  target_ids, target_segment_ids, target_positions
        labels:   target_labels, target_weights

    With `repeat` the stream is endless, and its batch s is a function of the data, these settings
    and s alone, whatever was read before and by how many processes. Without, every example of the
    split appears exactly once and the last batch is filled up with empty rows of weight 0; with
    rows BUCKETED a batch of shorter pairs is [2B, L/2] or [4B, L/4]: all hold as many tokens.

    Process p of n yields rows [p*B/n, (p+1)*B/n) of each batch; `specs` are of all B.
    """

    @classmethod
    def Params(cls) -> hyperparams.InstantiableParams:
        """The input's hyperparameters."""
        p = hyperparams.InstantiableParams(cls)
        p.Define("data_dir", hyperparams.REQUIRED, "A folder that data_prep.build prepared.")
        p.Define("batch_size", hyperparams.REQUIRED, "B, rows a batch.")
        p.Define("source_len", hyperparams.REQUIRED, "L of the source side, tokens a row.")
        p.Define("target_len", hyperparams.REQUIRED, "L of the target side, tokens a row.")
        p.Define("split", "train", "train, dev or test.")
        p.Define(
            "languages", None, "Language codes; None for all that the split has.", optional=tuple
        )
        p.Define("temperature", 5.0, "T of the mixture: p_l proportional to n_l**(1/T).")
        p.Define(
            "max_repeats",
            20.0,
            "Of an example in as many draws as there are; or None.",
            optional=float,
        )
        p.Define("repeat", True, "Endless and mixed, or one pass, language after language.")
        p.Define("shuffle", True, "Shuffle the examples, and the rows.")
        p.Define("rows", Rows.PACKED, "PACKED, SINGLE, or, of one pass, BUCKETED.")
        p.Define("seed", 1, "Of the mixture and the shuffles.")
        p.Define(
            "num_lanes",
            None,
            "V, what processes share a batch by; None for gcd(B, 8).",
            optional=int,
        )
        p.Define("process_index", 0, "p.")
        p.Define("num_processes", 1, "n, a divisor of V.")
        p.Define("verify_checksums", True, "Hash all files that will be read, before the start.")
        return p

    def __init__(self, params: hyperparams.Params):
        """Opens the data.

        Raises:
            ValueError: not a prepared folder, or a damaged one; a split or language that it does
                not hold; a size below 1; processes or lanes that do not divide a batch.
        """
        self.p = params.Copy().Freeze()
        p = self.p
        self._manifest = manifest.load(p.data_dir)
        self._shape = packing.RowShape(p.source_len, p.target_len)
        self._languages = mixture.languages_of(self._manifest, p.split, p.languages)
        if p.verify_checksums:
            manifest.verify(p.data_dir, self._files())
        prefetched = grain_experimental.ThreadPrefetchIterDataset(
            self._training_rows() if p.repeat else self._one_pass(),
            prefetch_buffer_size=_PREFETCHED_BATCHES,
        )
        self._open = [iter(prefetched)]
        # At exit Grain's own clean-up comes too late: modules that it uses are gone by then.
        weakref.finalize(self, _close, self._open)
        self._start_state = self._iterator.get_state()
        self._num_too_long = 0

    @property
    def specs(self) -> NestedMap:
        """The TensorSpecs of a batch."""
        return packing.batch_specs(self.p.batch_size, self._shape)

    @property
    def languages(self) -> tuple[str, ...]:
        """The codes of the languages that are read."""
        return tuple(language.code for language in self._languages)

    @property
    def num_examples(self) -> int:
        """The examples of one pass over the split."""
        return sum(language.num_examples(self.p.split) for language in self._languages)

    @property
    def source_vocab_size(self) -> int:
        """Pieces of the source vocabulary."""
        return self._manifest.source_vocabulary.size

    @property
    def target_vocab_size(self) -> int:
        """Pieces of the target vocabulary."""
        return self._manifest.target_vocabulary.size

    @property
    def num_truncated(self) -> int:
        """Examples cut to the rows' lengths so far, in one pass; 0 with `repeat`."""
        return 0 if self.p.repeat else self._num_too_long

    @property
    def num_skipped(self) -> int:
        """Examples left out as too long since this was opened, with `repeat`; 0 in one pass."""
        return self._num_too_long if self.p.repeat else 0

    def __iter__(self) -> "TranslationInput":
        return self

    def __next__(self) -> NestedMap:
        batch = next(self._iterator)
        self._num_too_long = batch.num_too_long
        return packing.batch_of(batch.arrays)

    def get_state(self) -> dict[str, Any]:
        """Where the batch after the last one returned starts: a few numbers, JSON-able.

        It is that of all processes.
        """
        return dict(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues as the input of which this is the state would have, bit for bit.

        Raises:
            ValueError: not a state of this class.
        """
        expected = sorted(self._start_state)
        if sorted(state) != expected:
            raise ValueError(f"input state has {sorted(state)}, expected {expected}")
        self._iterator.set_state({name: int(value) for name, value in state.items()})
        self._num_too_long = 0

    def reset(self) -> None:
        """Starts again from the first batch, as for a second evaluation."""
        self.set_state(self._start_state)

    def close(self) -> None:
        """Stops the prefetch thread."""
        _close(self._open)

    def _files(self) -> list[manifest.DataFile]:
        data = self._manifest
        shards = [shard for one in self._languages for shard in one.records[self.p.split].shards]
        files = [data.source_vocabulary.file, data.target_vocabulary.file]
        files += [shard.file for shard in shards]
        return files if self.p.repeat else files + [shard.lengths for shard in shards]

    def _sources(self) -> list[RecordSource]:
        return [RecordSource(self.p.data_dir, one.records[self.p.split]) for one in self._languages]

    def _training_rows(self) -> grain.IterDataset[training_rows.RowBatch]:
        p = self.p
        num_lanes = math.gcd(p.batch_size, _LANES) if p.num_lanes is None else p.num_lanes
        config = training_rows.RowConfig(
            batch_size=p.batch_size,
            shape=self._shape,
            rows=p.rows,
            shuffle=p.shuffle,
            num_lanes=num_lanes,
            lanes=_share("num_lanes", num_lanes, p),
            seed=p.seed,
        )
        order = mixture.MixtureConfig(p.temperature, p.max_repeats, p.shuffle, p.seed)
        rows = training_rows.TrainingRows(mixture.Mixture(self._sources(), order), config)
        return _read_in_turn(rows)

    def _one_pass(self) -> grain.IterDataset[training_rows.RowBatch]:
        p = self.p
        own = _share("batch_size", p.batch_size, p)
        config = one_pass_rows.OnePassConfig(
            batch_size=p.batch_size,
            shape=self._shape,
            rows=p.rows,
            shuffle=p.shuffle,
            seed=p.seed,
            own_rows=slice(own.start, own.stop),
        )
        examples = mixture.OnePass(self._sources(), p.shuffle, p.seed)
        if p.rows is Rows.BUCKETED:
            return _read_in_turn(bucketed_rows.BucketedRows(examples, config))
        return one_pass_rows.OnePassRows(examples, config)

    @property
    def _iterator(self) -> grain.DatasetIterator[training_rows.RowBatch]:
        if not self._open:
            raise ValueError("this input is closed")
        return self._open[0]


def _read_in_turn(
    rows: grain.MapDataset[training_rows.RowBatch],
) -> grain.IterDataset[training_rows.RowBatch]:
    # The thread around it is the one that reads.
    return rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def _share(name: str, number: int, p: hyperparams.Params) -> range:
    """The part of range(number) that is this process's."""
    if p.num_processes < 1 or number % p.num_processes:
        raise ValueError(f"num_processes {p.num_processes} does not divide {name} {number}")
    if not 0 <= p.process_index < p.num_processes:
        raise ValueError(f"process_index {p.process_index}: expected 0 to {p.num_processes - 1}")
    size = number // p.num_processes
    return range(p.process_index * size, (p.process_index + 1) * size)


def _close(iterators: list[grain.DatasetIterator]) -> None:
    while iterators:
        iterators.pop().close()
