"""Writes a split in a direction: its raw text, and its selected text, tokenized, as records.

A shard's examples are tokenized in batches by the vocabularies of their sides. The pieces become
records at once, so that only one batch is in memory; meanwhile, statistics and lengths are
collected. A document is the target of a record without source ids.
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

from data_prep import languages, text_chunks, tsv
from data_prep.directions import Direction
from data_prep.rules import Dropped, Rule
from data_prep.shards import Shard
from data_prep.text_chunks import Chunk
from data_prep.tsv import Example
from lingvo_gshard.input import example_codec, manifest
from lingvo_gshard.input.bpe_tokenizer import loaded
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.tokenizer import Tokenizer
from xla_spmd.files import atomic_file, digests

# The size of a batch, whose text and pieces are in memory: it ends at either limit.
_EXAMPLES_PER_BATCH = 2048
_CHARACTERS_PER_BATCH = 1 << 22
# To read a record, a reader reads its group, here about 2 kB; to open a file, it reads an index
# with an entry for each group.
_WRITER_OPTIONS = "group_size:16,uncompressed"


@dataclasses.dataclass(frozen=True)
class _Summable:
    """A data class of counts, which is added field by field."""

    def __add__(self, other: Self) -> Self:
        sums = {}
        for field in dataclasses.fields(self):
            sums[field.name] = getattr(self, field.name) + getattr(other, field.name)
        return type(self)(**sums)


@dataclasses.dataclass(frozen=True)
class SideStatistics(_Summable):
    """Counts over the text of one side."""

    # The number of sentences by their length in pieces, including EOS.
    lengths: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    num_words: int = 0  # Words are separated by white space.
    num_characters: int = 0  # White space does not count.
    num_byte_pieces: int = 0  # Pieces for single bytes of characters without a piece.
    num_unknown: int = 0  # Pieces with the unknown id.
    num_bytes: int = 0  # In UTF-8, including white space.

    @property
    def num_pieces(self) -> int:
        """The number of pieces, including an EOS for each sentence."""
        return sum(length * number for length, number in self.lengths.items())


@dataclasses.dataclass(frozen=True)
class Encoded(_Summable):
    """Files of records, the statistics of their sides, and the number of pairs dropped.

    The source's statistics of documents are empty.
    """

    shards: tuple[manifest.Shard, ...] = ()
    source: SideStatistics = SideStatistics()
    target: SideStatistics = SideStatistics()
    dropped: Dropped = dataclasses.field(default_factory=collections.Counter)
    # The number of examples by the length of their longer side in pieces.
    longer_sides: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    @property
    def records(self) -> manifest.Records:
        """The files and the numbers of tokens, for the manifest."""
        return manifest.Records(
            shards=self.shards,
            num_source_tokens=self.source.num_pieces,
            num_target_tokens=self.target.num_pieces,
            num_source_byte_tokens=self.source.num_byte_pieces,
            num_target_byte_tokens=self.target.num_byte_pieces,
            num_target_bytes=self.target.num_bytes,
        )


@dataclasses.dataclass(frozen=True)
class _Tokenized:
    """The sides of an example in a direction, as text and as ids including EOS."""

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]

    @property
    def source_ids(self) -> list[int]:
        """The source's ids; empty for a document."""
        return self.ids[0] if len(self.ids) == 2 else []

    @property
    def target_ids(self) -> list[int]:
        """The target's ids, or the document's."""
        return self.ids[-1]

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of pieces of source and target."""
        return len(self.source_ids), len(self.target_ids)


class _Encoder:
    """Turns examples into records, and collects counts."""

    def __init__(
        self, direction: Direction, models: Sequence[pathlib.Path], max_pieces: float
    ) -> None:
        self._direction = direction
        self._tokenizers = list(map(loaded, models))
        # The ids at the beginning of each side.
        self._beginnings: list[list[int]] = [[] for _ in models]
        if direction.codes:
            for side, code in enumerate(direction.codes):
                self._beginnings[side] = [self._tokenizers[side].languages[code]]
        self._max_pieces = max_pieces

        self.sides = [SideStatistics() for _ in models]
        self.num_dropped = 0
        self.lengths: list[tuple[int, int]] = []  # Each record's source and target, in pieces.

    def records(self, examples: Iterable[Example]) -> Iterator[bytes]:
        """Yields a record for each example that is short enough."""
        for batch in _batches(examples):
            # Dropped examples do not count in the statistics.
            tokenized = self._tokenized(batch)
            kept = [example for example in tokenized if max(example.lengths) <= self._max_pieces]
            self._count(kept, num_dropped=len(tokenized) - len(kept))
            for example in kept:
                yield example_codec.encode(example.source_ids, example.target_ids)

    def _texts(self, example: Example) -> tuple[str, ...]:
        """Returns a pair's source and target, or a document, normalized for their vocabularies."""
        sides = self._direction.record_sides(example)
        forms = (tokenizer.normalize for tokenizer in self._tokenizers)
        return tuple(form(side) for form, side in zip(forms, sides, strict=True))

    def _tokenized(self, batch: Sequence[Example]) -> list[_Tokenized]:
        texts = list(map(self._texts, batch))

        # One call for the whole batch is faster than a call for each sentence.
        ids_of_sides = []
        for side, of_side in enumerate(zip(*texts, strict=True)):
            beginning = self._beginnings[side]
            ids = self._tokenizers[side].encode_all(of_side)
            ids_of_sides.append([beginning + of_text for of_text in ids])
        return list(map(_Tokenized, texts, zip(*ids_of_sides, strict=True)))

    def _count(self, kept: Sequence[_Tokenized], num_dropped: int) -> None:
        """Adds the kept examples to the statistics and lengths."""
        self.num_dropped += num_dropped
        for side, tokenizer in enumerate(self._tokenizers):
            self.sides[side] += _statistics(
                [example.texts[side] for example in kept],
                [example.ids[side] for example in kept],
                tokenizer,
            )

        # The lengths are in the order of the records.
        self.lengths += [example.lengths for example in kept]


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Divides examples, in order, into batches that fit into memory."""
    batch: list[Example] = []
    num_characters = 0
    for example in examples:
        batch.append(example)
        num_characters += sum(map(len, example.sides))
        if len(batch) == _EXAMPLES_PER_BATCH or num_characters >= _CHARACTERS_PER_BATCH:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch


def encode(
    shard: Shard,
    direction: Direction,
    data_dir: pathlib.Path,
    name: str,
    models: Sequence[pathlib.Path],
    max_pieces: float,
) -> Encoded:
    """Writes a shard's records to `name`.array_record and their lengths to `name`.lengths.npy.

    `models` are the source's and the target's models, or a document's one. Training examples with a
    side of more than `max_pieces` pieces, including EOS, are dropped.
    """
    is_training = shard.chunks[0].split == "train"
    # The limit does not apply to dev and test.
    encoder = _Encoder(direction, models, max_pieces if is_training else math.inf)
    records_path = f"{name}.array_record"
    num_examples = write_records(data_dir / records_path, encoder.records(shard.examples()))

    # In the smallest dtype that holds the longest: most shards need one byte per length.
    lengths = np.array(encoder.lengths, np.int64).reshape(-1, 2)
    lengths_path = f"{name}.lengths.npy"
    smallest_type = np.min_scalar_type(lengths.max(initial=0))
    text_chunks.save_array(data_dir / lengths_path, lengths.astype(smallest_type))

    written = manifest.Shard(
        file=digests.describe(data_dir, records_path),
        lengths=digests.describe(data_dir, lengths_path),
        num_examples=num_examples,
        num_target_tokens=int(lengths[:, 1].sum()),
    )
    dropped: Dropped = collections.Counter()
    if encoder.num_dropped > 0:
        dropped[direction.language, Rule.TOO_MANY_PIECES] = encoder.num_dropped
    source = encoder.sides[0] if len(encoder.sides) == 2 else SideStatistics()
    longer_sides = collections.Counter(map(max, encoder.lengths))
    return Encoded((written,), source, encoder.sides[-1], dropped, longer_sides)


def write_text(
    chunks: Sequence[Chunk],
    split: str,
    direction: Direction,
    data_dir: pathlib.Path,
    kind: Kind = Kind.PARALLEL,
) -> digests.File:
    """Writes the raw text of a split in a direction, source first, and returns its file."""
    name = f"{direction.code}.tsv.gz"  # The codes en-de and de-fr already have both languages.
    if kind is Kind.TEXT:
        name = f"{direction.code}.txt.gz"
    elif direction.target == languages.ENGLISH:
        name = f"{direction.code}-{languages.ENGLISH}.tsv.gz"

    path = f"text/{split}/{name}"
    tsv.write(data_dir / path, _turned(chunks, direction))
    return digests.describe(data_dir, path)


def _turned(chunks: Sequence[Chunk], direction: Direction) -> Iterator[Example]:
    """Yields the examples of chunks with the direction's source first."""
    for chunk in chunks:
        for example in chunk.examples():
            yield tsv.with_sides(example, direction.sides(example))


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
    texts: Sequence[str], ids: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> SideStatistics:
    """Returns the counts over one side of some examples, given its texts and ids."""
    # Counts of the text itself, which the report compares with the pieces.
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
        num_bytes=sum(len(text.encode()) for text in texts),
        num_byte_pieces=tokenizer.num_byte_pieces(all_ids),
        num_unknown=all_ids.count(tokenizer.unk_id),
    )
