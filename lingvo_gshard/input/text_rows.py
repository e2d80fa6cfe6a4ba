"""The input of language models: rows of fixed length, cut from concatenated documents.

B rows, L tokens of a row.

The documents (5 6 2) and (7 8 9 2), whose last token 2 is EOS, in two rows of L=5:

    ids          1 5 6 1 7      8 9 0 0 0
    segment_ids  1 1 1 2 2      1 1 0 0 0
    positions    0 1 2 0 1      0 1 0 0 0
    labels       5 6 2 7 8      9 2 0 0 0
    weights      1 1 1 1 1      1 1 0 0 0

The input is the labels shifted right, with BOS at the start of a document. A document that
continues in the next row begins a segment there, whose first input is the document's last token
before it. So every token of every document is a label once, and only the last row of a file of
records has padding. If the vocabulary does not begin texts with BOS, as in some imported models,
the first token of a document is an input but not a label.

A file's rows are fixed: they depend on the data, L, the seed and whether documents are shuffled
within the file, and there are ceil(tokens / L) of them. So the number of rows of all files follows
from the manifest, and any row can be made by itself.
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import manifest, mixture, packing, prefetched
from lingvo_gshard.input.bpe_tokenizer import loaded
from lingvo_gshard.input.example_codec import BOS_ID, PAD_ID
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.mixture import Mixture
from lingvo_gshard.input.prepared_input import PreparedInput
from lingvo_gshard.input.records import RecordSource, read_lengths
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.sharding.layout import TensorSpec
from xla_spmd.files import digests

_MAX_LAID_OUT_FILES = 256  # The files whose layout is in memory, at 16 bytes per document.


class TextInput(PreparedInput):
    """An iterator of batches over a prepared data folder of text.

    A batch is a NestedMap of arrays [B, L], as above: int32, except for float32 weights.

        features: ids, segment_ids, positions
        labels:   labels, weights, num_bytes

    `num_bytes` is the number of bytes of normalized text, in UTF-8, that each label represents: 0
    for EOS and padding. The sum of nats over the sum of bytes, divided by ln 2, is the bits per
    byte.

    With `repeat` the stream is endless: rows of all corpora, mixed, and each row appears once
    before any row of its corpus is repeated. Without it, every row of the split appears once, and
    empty rows fill up the last batch. Batch s depends only on the data, the settings and s; n
    processes make the same batches as one, and each reads only its own rows.
    """

    KIND: ClassVar[Kind] = Kind.TEXT

    class Params(PreparedInput.Params):
        row_len: int = setting(REQUIRED, "L, tokens per row.")

        # How often each row appears.
        temperature: float = setting(1.0, "T of the mixture: p_l is proportional to rows_l**(1/T).")
        max_repeats: float | None = setting(
            20.0, "The most passes over a corpus during one pass over all; None sets no limit."
        )

    p: Params

    @staticmethod
    def batch_specs(p: Params) -> NestedMap:
        """Returns the TensorSpecs of a batch, from the settings alone, without any data."""
        no_pieces = np.zeros(0, np.int32)
        return _fill([], p.row_len, no_pieces, no_pieces).Transform(
            lambda array: TensorSpec((p.batch_size, p.row_len), array.dtype.name, "BL")
        )

    def __init__(self, params: Params, *, process_index: int = 0, num_processes: int = 1):
        """Checks the vocabulary, and the presence and the sizes of the record files.

        Each of n processes checks an n-th of these files and gets B/n rows of each batch. Raises
        ValueError if the folder is not a prepared one of text or is damaged, if it lacks the split
        or a corpus, if a size is below 1, or if n processes cannot share the batches. Damage to a
        file of records is noticed when the file is first read.
        """
        p = params.Copy().Freeze()
        prefetched.check_share(p, num_processes)
        if p.row_len < 1:
            raise ValueError(f"row_len {p.row_len}: expected at least 1")
        self.p = p

        # The TensorSpecs of a batch with the rows of all processes, as the program expects it.
        self.specs = self.batch_specs(p)

        data, corpora = self._checked_parts(p, process_index, num_processes)
        records = [corpus.records[p.split] for corpus in corpora]

        vocabulary = loaded(digests.local(p.data_dir, data.target_vocabulary.file))
        rows = _TextRows(p, records, vocabulary.adds_bos)
        if p.repeat and process_index == 0:
            mixture.warn_of_limits(corpora, rows.sizes, p)
        batches = _TextBatches(rows, p, vocabulary, process_index, num_processes)
        self._size = None if p.repeat else len(batches)
        super().__init__(batches)

    def count_batches(self, limit: int | None) -> int | None:
        """Returns the number of batches, at most `limit`."""
        counts = [count for count in (self._size, limit) if count is not None]
        return min(counts, default=None)


@dataclasses.dataclass(frozen=True)
class _Segment:
    """A part of a document in a row: its labels, int32 [n], and the token before them."""

    ids: np.ndarray
    previous: int


_Row = list[_Segment]


class _TextBatches:
    """Batches by index."""

    def __init__(
        self,
        rows: "_TextRows",
        params: TextInput.Params,
        vocabulary: Tokenizer,
        process_index: int,
        num_processes: int,
    ) -> None:
        self._rows = rows
        self._params = params
        self._mixture = Mixture(rows, params)
        self._num_rows = params.batch_size // num_processes  # The rows of this process.
        self._first_row = process_index * self._num_rows

        # The first piece of a document may include the mark of a space that the text lacks.
        self._num_bytes = vocabulary.num_bytes()
        self._has_space = np.zeros_like(self._num_bytes)
        if vocabulary.adds_bos:  # Otherwise the first piece is not a label.
            self._has_space = vocabulary.begins_with_space().astype(np.int32)

    def __len__(self) -> int:
        if self._params.repeat:
            return sys.maxsize
        return math.ceil(sum(self._rows.sizes) / self._params.batch_size)

    def __getitem__(self, index: int) -> NestedMap:
        """Returns this process's rows of batch `index`."""
        start = index * self._params.batch_size + self._first_row
        end = start + self._num_rows
        if self._params.repeat:
            rows = self._mixture.read_numbers(start, end)
        else:
            rows = self._in_turn(start, end)
        rows += [[]] * (self._num_rows - len(rows))  # The last batch of a pass may lack rows.
        return _fill(rows, self._params.row_len, self._num_bytes, self._has_space)

    def _in_turn(self, start: int, end: int) -> list[_Row]:
        """Returns some rows of the single pass."""
        num_rows = sum(self._rows.sizes)
        indices = np.arange(start, max(start, min(end, num_rows)))
        if self._params.shuffle:
            indices = mixture.shuffled(indices, num_rows, self._params.seed)
        return self._rows.read(indices)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The layout of a file's n documents, concatenated: their order, and where each one ends."""

    documents: np.ndarray  # Their indices over all files, in order, int64 [n].
    ends: np.ndarray  # The place after the last label of each, in this order, int64 [n].


class _TextRows:
    """The rows of some corpora's split; `sizes` has their counts, and indices run over them all."""

    def __init__(
        self, params: TextInput.Params, records: Sequence[manifest.Records], adds_bos: bool
    ) -> None:
        """Does not open files yet."""
        self._params = params
        # The tokens before a document's records, and its tokens in records that are not labels.
        self._beginning = np.array([BOS_ID] if adds_bos else [], np.int32)
        self._num_unlabeled = 1 - len(self._beginning)
        self._source = RecordSource(params.data_dir, *records, hashed=params.hash_records)

        self._shards: list[manifest.Shard] = []
        self.sizes: list[int] = []  # In rows.
        num_rows: list[int] = []
        for of_corpus in records:
            self._shards += of_corpus.shards
            of_shards: list[int] = []
            for shard in of_corpus.shards:
                num_labels = shard.num_target_tokens - self._num_unlabeled * shard.num_examples
                of_shards.append(math.ceil(num_labels / params.row_len))
            num_rows += of_shards
            self.sizes.append(sum(of_shards))

        # For each file: the index after its last row, and the index of its first document.
        self._row_ends = np.cumsum(num_rows)
        num_documents = np.array([shard.num_examples for shard in self._shards])
        self._first_documents = np.cumsum(num_documents) - num_documents
        self._layout = functools.lru_cache(_MAX_LAID_OUT_FILES)(self._lay_out)

    def read(self, indices: np.ndarray) -> list[_Row]:
        """Returns the rows at int [n] indices, in their order.

        Raises ValueError if a file with one of them is missing or damaged.
        """
        # The first and the last document of each row, in its file's order.
        documents: list[np.ndarray] = []
        starts: list[int] = []
        for index in indices.tolist():
            layout, start = self._place(index)
            first = np.searchsorted(layout.ends, start, side="right")
            last = np.searchsorted(layout.ends, start + self._params.row_len - 1, side="right")
            documents.append(layout.documents[first : last + 1])
            # The row's beginning, counted from the start of its first document.
            begin_of_first = layout.ends[first - 1] if first > 0 else 0
            starts.append(int(start - begin_of_first))

        # All documents are read at once, since a call reads each file once.
        wanted, inverse = np.unique(np.concatenate([_NONE, *documents]), return_inverse=True)
        tokens = [
            np.concatenate([self._beginning, example.target_ids], dtype=np.int32)
            for example in self._source.read(wanted)
        ]

        rows: list[_Row] = []
        num_read = 0
        for start, of_row in zip(starts, documents, strict=True):
            texts = [tokens[i] for i in inverse[num_read : num_read + len(of_row)]]
            rows.append(_cut(texts, start, self._params.row_len))
            num_read += len(of_row)
        return rows

    def _place(self, index: int) -> tuple[_Layout, int]:
        """Returns the layout of the file with a row, and the place of the row's first label."""
        shard_number = int(np.searchsorted(self._row_ends, index, side="right"))
        first_row = self._row_ends[shard_number - 1] if shard_number > 0 else 0
        return self._layout(shard_number), int(index - first_row) * self._params.row_len

    def _lay_out(self, shard_number: int) -> _Layout:
        """Returns the layout of a file. Raises ValueError if its lengths are damaged."""
        shard = self._shards[shard_number]
        lengths = read_lengths(self._params.data_dir, [shard])[:, 1].astype(np.int64)
        if len(lengths) != shard.num_examples or lengths.sum() != shard.num_target_tokens:
            raise ValueError(
                f"{self._params.data_dir}/{shard.lengths.path}: {len(lengths)} documents of "
                f"{lengths.sum()} tokens, but the manifest has {shard.num_examples} of "
                f"{shard.num_target_tokens}"
            )

        order = np.arange(len(lengths))
        if self._params.shuffle:
            # Seeded by the file, not its number: a corpus has the same rows alone as among others.
            file_seed = int(shard.file.sha256[:16], 16)
            order = np.random.default_rng([self._params.seed, file_seed]).permutation(order)
        ends = np.cumsum(lengths[order] - self._num_unlabeled)
        return _Layout(self._first_documents[shard_number] + order, ends)


_NONE = np.empty(0, np.int64)


def _cut(texts: Sequence[np.ndarray], start: int, row_len: int) -> _Row:
    """Returns a row from documents int32 [n], which begins at label `start` of the first one.

    A document's labels are all of its tokens but the first.
    """
    row: _Row = []
    num_free = row_len
    for text in texts:
        labels = text[start + 1 : start + 1 + num_free]
        if len(labels) > 0:  # A document may be its EOS alone.
            row.append(_Segment(labels, int(text[start])))
        num_free -= len(labels)
        start = 0
    return row


def _fill(
    rows: Sequence[_Row], row_len: int, num_bytes: np.ndarray, has_space: np.ndarray
) -> NestedMap:
    """Returns the features and labels of rows, as above.

    `num_bytes` has the number of bytes that each piece of the vocabulary represents, int32 [V],
    including `has_space` bytes for the space before a word.
    """
    segments = list(itertools.chain.from_iterable(rows))
    sizes = np.array([len(row) for row in rows], np.int64)
    texts = [segment.ids for segment in segments]
    labels, segment_ids, positions = packing.side(texts, sizes, row_len)
    is_token = segment_ids > 0  # Segments count from 1; 0 is padding.

    # The input: the labels shifted right; a segment starts with the token before it.
    is_first = is_token & (positions == 0)
    ids = np.roll(labels, 1, axis=1)
    ids[is_first] = [segment.previous for segment in segments]
    ids[~is_token] = PAD_ID

    begins_document = is_first & (ids == BOS_ID)
    bytes_of_labels = np.zeros_like(labels)
    bytes_of_labels[is_token] = num_bytes[labels[is_token]]
    bytes_of_labels[begins_document] -= has_space[labels[begins_document]]

    return NestedMap(
        features=NestedMap(zip(packing.TEXT, (ids, segment_ids, positions), strict=True)),
        labels=NestedMap(
            labels=labels, weights=is_token.astype(np.float32), num_bytes=bytes_of_labels
        ),
    )
