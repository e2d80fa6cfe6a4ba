"""Writes a split in a direction: its raw text, and its selected text, tokenized, as records."""

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

from data_prep import chunks, cleaning, languages, tsv
from data_prep.chunks import Chunk
from data_prep.cleaning import Rule
from data_prep.directions import Direction
from data_prep.shards import Shard
from lingvo_gshard.files import atomic_file, digests
from lingvo_gshard.input import example_codec, manifest

_PAIRS_PER_BATCH = 2048
# A record is read with its group, of 2 kB; a file's index, read to open it, has an entry a group.
_WRITER_OPTIONS = "group_size:16,uncompressed"


class _Summable:
    """A data class of counts; its sum is that of every field."""

    def __add__(self, other: Self) -> Self:
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(mine + theirs for mine, theirs in both))


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
    dropped: chunks.Dropped = dataclasses.field(default_factory=collections.Counter)

    @property
    def records(self) -> manifest.Records:
        """The files and numbers of tokens."""
        tokens = (self.source.num_pieces, self.target.num_pieces)
        return manifest.Records(self.shards, *tokens, self.source.num_byte_pieces)


def encode(
    shard: Shard,
    direction: Direction,
    data_dir: pathlib.Path,
    name: str,
    models: tuple[pathlib.Path, ...],
    max_pieces: int,
) -> Encoded:
    """Writes a shard's records to `name`.array_record and their lengths to `name`.lengths.npy.

    Training pairs with a side of more than `max_pieces` of its model, with EOS, are dropped.
    """
    is_train = shard.chunks[0].split == "train"  # Other splits were written unchanged.
    limit = max_pieces if is_train else math.inf
    pairs = shard.pairs() if is_train else map(cleaning.normalize_pair, shard.pairs())
    processors = [SentencePieceProcessor(model_file=str(model)) for model in models]
    parts: list[Encoded] = []
    lengths: list[tuple[int, int]] = []

    def records() -> Iterator[bytes]:
        turned = map(direction.turned, pairs)
        while batch := list(itertools.islice(turned, _PAIRS_PER_BATCH)):
            sides = list(zip(*batch, strict=True))
            both_ids = [
                processor.encode(list(side), add_eos=True)
                for side, processor in zip(sides, processors, strict=True)
            ]
            is_short = [max(map(len, ids)) <= limit for ids in zip(*both_ids, strict=True)]
            texts, kept = (
                [list(itertools.compress(side, is_short)) for side in each]
                for each in (sides, both_ids)
            )
            dropped = {(direction.language, Rule.TOO_MANY_PIECES): is_short.count(False)}
            of_source, of_target = map(_statistics, texts, kept, processors)
            parts.append(Encoded((), of_source, of_target, collections.Counter(dropped)))
            for source, target in zip(*kept, strict=True):
                lengths.append((len(source), len(target)))
                yield example_codec.encode(source, target)

    paths = f"{name}.array_record", f"{name}.lengths.npy"
    num_examples = write_records(data_dir / paths[0], records())
    of_all = np.array(lengths, np.int64).reshape(-1, 2)
    chunks.save_array(data_dir / paths[1], of_all.astype(np.min_scalar_type(of_all.max(initial=0))))
    file, lengths_file = (digests.describe(data_dir, path) for path in paths)
    return sum(parts, Encoded((manifest.Shard(file, lengths_file, num_examples),)))


def write_text(
    members: Sequence[Chunk], split: str, direction: Direction, data_dir: pathlib.Path
) -> digests.File:
    """Writes the raw text of a split in a direction."""
    both = direction.code if direction.from_english else f"{direction.code}-{languages.ENGLISH}"
    path = f"text/{split}/{both}.tsv.gz"
    pairs = itertools.chain.from_iterable(chunk.pairs() for chunk in members)
    tsv.write(data_dir / path, (tsv.Pair(*direction.turned(pair)) for pair in pairs))
    return digests.describe(data_dir, path)


def write_records(path: pathlib.Path, records: Iterable[bytes]) -> int:
    """Writes an ArrayRecord file; returns the number of records. An OSError names the file."""
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
    words = [text.split() for text in texts]
    all_ids = np.fromiter(itertools.chain.from_iterable(ids), np.int64)
    return SideStatistics(
        lengths=collections.Counter(map(len, ids)),
        num_words=sum(map(len, words)),
        num_characters=sum(len(word) for text in words for word in text),
        num_byte_pieces=sum(processor.is_byte(all_ids.tolist())),
        num_unknown=int((all_ids == example_codec.UNK_ID).sum()),
    )
