"""Writes a split in a direction: its raw text, and its selected text, tokenized, as records.

A shard's pairs go through the two vocabularies in batches. The pieces become records at once, so
that one batch is in memory; their statistics and lengths are collected meanwhile.
"""

import collections
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
from sentencepiece import SentencePieceProcessor

from data_prep import cleaning, languages, text_chunks, tsv
from data_prep.cleaning import Dropped, Rule
from data_prep.directions import Direction
from data_prep.shards import Shard
from data_prep.text_chunks import Chunk
from lingvo_gshard.files import atomic_file, digests
from lingvo_gshard.input import example_codec, manifest

_PAIRS_PER_BATCH = 2048  # Of which text and pieces are in memory.
# To read a record, the reader reads its group, here about 2 kB; to open a file, it reads an index
# with an entry for each group.
_WRITER_OPTIONS = "group_size:16,uncompressed"


@dataclasses.dataclass(frozen=True)
class _Summable:
    """A data class of counts. Two are added field by field."""

    def __add__(self, other: Self) -> Self:
        sums = {}
        for field in dataclasses.fields(self):
            sums[field.name] = getattr(self, field.name) + getattr(other, field.name)
        return type(self)(**sums)


@dataclasses.dataclass(frozen=True)
class SideStatistics(_Summable):
    """Counts over the text of one side."""

    # The number of sentences of each length in pieces, with EOS.
    lengths: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    num_words: int = 0  # Separated by white space.
    num_characters: int = 0  # Other than white space.
    num_byte_pieces: int = 0  # Each stands for one byte of a character without a piece.
    num_unknown: int = 0  # Pieces with the unknown id.

    @property
    def num_pieces(self) -> int:
        """The number of pieces, with an EOS for each sentence."""
        return sum(length * number for length, number in self.lengths.items())


@dataclasses.dataclass(frozen=True)
class Encoded(_Summable):
    """Files of records, the statistics of their two sides, and the number of pairs dropped."""

    shards: tuple[manifest.Shard, ...] = ()
    source: SideStatistics = SideStatistics()
    target: SideStatistics = SideStatistics()
    dropped: Dropped = dataclasses.field(default_factory=collections.Counter)

    @property
    def records(self) -> manifest.Records:
        """The files and numbers of tokens, as the manifest lists them."""
        return manifest.Records(
            shards=self.shards,
            num_source_tokens=self.source.num_pieces,
            num_target_tokens=self.target.num_pieces,
            num_source_byte_tokens=self.source.num_byte_pieces,
        )


@dataclasses.dataclass(frozen=True)
class _TokenizedPair:
    """The source and target of a pair in a direction, as text and as ids with EOS."""

    source: str
    target: str
    source_ids: list[int]
    target_ids: list[int]

    @property
    def longer_side(self) -> int:
        """The larger number of pieces of the two sides."""
        return max(len(self.source_ids), len(self.target_ids))


class _Encoder:
    """Turns pairs into records, and counts what it has seen."""

    def __init__(
        self, direction: Direction, models: tuple[pathlib.Path, ...], max_pieces: float
    ) -> None:
        source_model, target_model = models
        self._direction = direction
        self._source_processor = SentencePieceProcessor(model_file=str(source_model))
        self._target_processor = SentencePieceProcessor(model_file=str(target_model))
        self._max_pieces = max_pieces

        self.source = SideStatistics()
        self.target = SideStatistics()
        self.num_dropped = 0
        self.lengths: list[tuple[int, int]] = []  # In pieces, of each record's two sides.

    def records(self, pairs: Iterable[tsv.Pair]) -> Iterator[bytes]:
        """Yields the record of each pair that is short enough."""
        remaining = iter(pairs)
        while batch := list(itertools.islice(remaining, _PAIRS_PER_BATCH)):
            # What is dropped counts nowhere else.
            tokenized = self._tokenized(batch)
            kept = [pair for pair in tokenized if pair.longer_side <= self._max_pieces]
            self._count(kept, num_dropped=len(tokenized) - len(kept))
            for pair in kept:
                yield example_codec.encode(pair.source_ids, pair.target_ids)

    def _tokenized(self, batch: Sequence[tsv.Pair]) -> list[_TokenizedPair]:
        sources: list[str] = []
        targets: list[str] = []
        for pair in batch:
            source, target = self._direction.turned(pair)
            sources.append(source)
            targets.append(target)

        # The whole batch in one call, which takes less time than a call for each sentence.
        source_ids = self._source_processor.encode(sources, add_eos=True)
        target_ids = self._target_processor.encode(targets, add_eos=True)
        columns = zip(sources, targets, source_ids, target_ids, strict=True)
        return list(itertools.starmap(_TokenizedPair, columns))

    def _count(self, kept: Sequence[_TokenizedPair], num_dropped: int) -> None:
        """Adds the pairs that were kept to the statistics and lengths."""
        self.num_dropped += num_dropped
        self.source += _statistics(
            [pair.source for pair in kept],
            [pair.source_ids for pair in kept],
            self._source_processor,
        )
        self.target += _statistics(
            [pair.target for pair in kept],
            [pair.target_ids for pair in kept],
            self._target_processor,
        )

        # In the order of the records.
        for pair in kept:
            self.lengths.append((len(pair.source_ids), len(pair.target_ids)))


def encode(
    shard: Shard,
    direction: Direction,
    data_dir: pathlib.Path,
    name: str,
    models: tuple[pathlib.Path, ...],
    max_pieces: int,
) -> Encoded:
    """Writes a shard's records to `name`.array_record and their lengths to `name`.lengths.npy.

    `models` are the source's and the target's. Training pairs with a side of more than `max_pieces`
    of its model, with EOS, are dropped.
    """
    pairs: Iterable[tsv.Pair] = shard.pairs()
    limit: float = max_pieces
    if shard.chunks[0].split != "train":
        # Their chunks are as they were read, and a test set loses nothing to a limit.
        pairs = map(cleaning.normalize_pair, pairs)
        limit = math.inf

    encoder = _Encoder(direction, models, limit)
    records_path = f"{name}.array_record"
    num_examples = write_records(data_dir / records_path, encoder.records(pairs))

    # In the smallest type that holds the longest: most shards need one byte a length.
    lengths = np.array(encoder.lengths, np.int64).reshape(-1, 2)
    lengths_path = f"{name}.lengths.npy"
    smallest_type = np.min_scalar_type(lengths.max(initial=0))
    text_chunks.save_array(data_dir / lengths_path, lengths.astype(smallest_type))

    written = manifest.Shard(
        file=digests.describe(data_dir, records_path),
        lengths=digests.describe(data_dir, lengths_path),
        num_examples=num_examples,
    )
    dropped: Dropped = collections.Counter()
    if encoder.num_dropped > 0:
        dropped[direction.language, Rule.TOO_MANY_PIECES] = encoder.num_dropped
    return Encoded((written,), encoder.source, encoder.target, dropped)


def write_text(
    chunks: Sequence[Chunk], split: str, direction: Direction, data_dir: pathlib.Path
) -> digests.File:
    """Writes the raw text of a split in a direction, and returns its file."""
    languages_of_pair = direction.code  # en-de already has both.
    if not direction.from_english:
        languages_of_pair = f"{direction.code}-{languages.ENGLISH}"

    path = f"text/{split}/{languages_of_pair}.tsv.gz"
    tsv.write(data_dir / path, _turned_pairs(chunks, direction))
    return digests.describe(data_dir, path)


def _turned_pairs(chunks: Sequence[Chunk], direction: Direction) -> Iterator[tsv.Pair]:
    """Yields the pairs of chunks with the direction's source, and its token, first."""
    for chunk in chunks:
        for pair in chunk.pairs():
            source, target = direction.turned(pair)
            yield tsv.Pair(source, target)


def write_records(path: pathlib.Path, records: Iterable[bytes]) -> int:
    """Writes an ArrayRecord file and returns the number of records. An OSError names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    num_records = 0
    with atomic_file.replacing(path, is_shared=True) as partial:
        writer = array_record_module.ArrayRecordWriter(str(partial), _WRITER_OPTIONS)
        for record in records:
            writer.write(record)
            num_records += 1

        try:
            writer.close()
        except RuntimeError as error:  # The library reports a full disk only here.
            raise OSError(str(error)) from error
    return num_records


def _statistics(
    texts: Sequence[str], ids: Sequence[Sequence[int]], processor: SentencePieceProcessor
) -> SideStatistics:
    """Counts over one side of some pairs, given their texts and ids."""
    # Of the text itself, which the report compares with the pieces.
    num_words = 0
    num_characters = 0
    for text in texts:
        words = text.split()
        num_words += len(words)
        num_characters += sum(map(len, words))

    all_ids = list(itertools.chain.from_iterable(ids))
    return SideStatistics(
        lengths=collections.Counter(map(len, ids)),
        num_words=num_words,
        num_characters=num_characters,
        num_byte_pieces=sum(processor.is_byte(all_ids)),
        num_unknown=all_ids.count(example_codec.UNK_ID),
    )
