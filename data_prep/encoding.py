"""Writes a split in a direction: its raw text, and its selected text, tokenized, as records."""

import collections
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import sentencepiece
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from data_prep import chunks, cleaning, files, languages, tsv
from data_prep.chunks import Chunk
from data_prep.cleaning import Rule
from data_prep.directions import Direction
from data_prep.shards import Shard
from lingvo_gshard import cli
from lingvo_gshard.core import digests
from lingvo_gshard.input import example_codec, manifest

_PAIRS_PER_BATCH = 2048
_Sides = tuple[str, str]  # Source and target.
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
        byte_tokens = (self.source.num_byte_pieces, self.target.num_byte_pieces)
        return manifest.Records(self.shards, *tokens, *byte_tokens)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Ids of n sentences one after another, each ended by EOS, and their bounds, int64 [n + 1]."""

    ids: np.ndarray
    splits: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.splits)

    def select(self, is_kept: np.ndarray) -> "Tokens":
        """Returns the sentences that `is_kept`, bool [n], marks."""
        splits = np.concatenate([[0], np.cumsum(self.lengths[is_kept])])
        return Tokens(self.ids[np.repeat(is_kept, self.lengths)], splits)


def encode(
    shard: Shard,
    direction: Direction,
    data_dir: pathlib.Path,
    name: str,
    models: tuple[pathlib.Path, ...],
    max_pieces: float,
) -> Encoded:
    """Writes a shard's records to `name`.array_record and their lengths to `name`.lengths.npy.

    Pairs with a side of more than `max_pieces`, with EOS, are dropped. `models` are both sides'.
    """
    parts: list[Encoded] = []
    lengths = [np.empty((0, 2), np.int64)]

    def records() -> Iterator[bytes]:
        for pairs, source, target in tokenize(_batches(shard, direction), *models):
            is_short = np.maximum(source.lengths, target.lengths) <= max_pieces
            source, target = source.select(is_short), target.select(is_short)
            kept = list(itertools.compress(pairs, is_short.tolist()))
            texts = list(zip(*kept, strict=True)) or [(), ()]
            of_source, of_target = map(_statistics, texts, (source, target), models)
            dropped = {(direction.language, Rule.TOO_MANY_PIECES): len(pairs) - len(kept)}
            parts.append(Encoded((), of_source, of_target, collections.Counter(dropped)))
            lengths.append(np.stack([source.lengths, target.lengths], axis=1))
            yield from example_codec.encode_batch(
                source.ids, source.splits, target.ids, target.splits
            )

    paths = f"{name}.array_record", f"{name}.lengths.npy"
    num_examples = write_records(data_dir / paths[0], records())
    of_all = np.concatenate(lengths)
    of_all = of_all.astype(np.min_scalar_type(of_all.max(initial=0)))
    files.save_array(data_dir / paths[1], of_all)
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
    with files.replacing(path) as partial:
        writer = array_record_module.ArrayRecordWriter(str(partial), _WRITER_OPTIONS)
        for record in records:
            writer.write(record)
            num_records += 1
        try:
            writer.close()
        except RuntimeError as error:  # The library reports a full disk only here.
            raise OSError(str(error)) from error
    return num_records


def tokenize(
    batches: Iterator[list[_Sides]], source_model: pathlib.Path, target_model: pathlib.Path
) -> Iterator[tuple[list[_Sides], Tokens, Tokens]]:
    """Yields each batch, in order, and the tokens of its two sides; threads work ahead."""
    # Only the processes that tokenize load TensorFlow.
    tf = cli.load("tensorflow")
    tf.config.set_visible_devices([], "GPU")  # Their memory is the training's.
    source_tokenizer, target_tokenizer = _tokenizer(source_model), _tokenizer(target_model)
    ahead: collections.deque[list[_Sides]] = collections.deque()

    def texts():  # TensorFlow calls it in a thread of its own.
        for pairs in batches:
            ahead.append(pairs)
            yield tuple(map(list, zip(*pairs, strict=True)))

    def ragged(source, target):
        sides = (source_tokenizer.tokenize(source), target_tokenizer.tokenize(target))
        return tuple((side.flat_values, side.row_splits) for side in sides)

    strings = tf.TensorSpec([None], tf.string)
    data = tf.data.Dataset.from_generator(texts, output_signature=(strings, strings))
    data = data.map(ragged, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    for source, target in data.prefetch(1).as_numpy_iterator():
        yield ahead.popleft(), Tokens(*source), Tokens(*target)


@functools.lru_cache(maxsize=2)
def _tokenizer(model: pathlib.Path) -> Any:
    text = cli.load("tensorflow_text")
    return text.SentencepieceTokenizer(model=model.read_bytes(), add_eos=True)


@functools.lru_cache(maxsize=2)
def _byte_pieces(model: pathlib.Path) -> np.ndarray:
    """Whether each id stands for a byte, bool [vocabulary size]."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return np.array([processor.is_byte(i) for i in range(processor.get_piece_size())])


def _statistics(texts: Sequence[str], tokens: Tokens, model: pathlib.Path) -> SideStatistics:
    words = [text.split() for text in texts]
    return SideStatistics(
        lengths=collections.Counter(tokens.lengths.tolist()),
        num_words=sum(map(len, words)),
        num_characters=sum(len(word) for text in words for word in text),
        num_byte_pieces=int(_byte_pieces(model)[tokens.ids].sum()),
        num_unknown=int((tokens.ids == example_codec.UNK_ID).sum()),
    )


def _batches(shard: Shard, direction: Direction) -> Iterator[list[_Sides]]:
    pairs = shard.pairs()
    if not all(chunk.split == "train" for chunk in shard.chunks):  # They were written unchanged.
        pairs = map(cleaning.normalize_pair, pairs)
    sides = map(direction.turned, pairs)
    while batch := list(itertools.islice(sides, _PAIRS_PER_BATCH)):
        yield batch
