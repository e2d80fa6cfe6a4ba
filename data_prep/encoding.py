"""From selected text to records: tokenized inside tf.data, by TensorFlow Text's SentencePiece."""

import collections
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import sentencepiece

from data_prep import chunks, cleaning, records, tsv
from lingvo_gshard.input import example_codec, manifest

if TYPE_CHECKING:
    import tensorflow_text

_PAIRS_PER_BATCH = 2048


@dataclasses.dataclass(frozen=True)
class EncodeJob:
    """Chunks that become the files `name`.array_record and `name`.lengths.npy of `data_dir`.

    `max_pieces`, of the longer side with EOS: longer pairs are dropped; None keeps all.
    """

    chunks: Sequence[chunks.Chunk]
    data_dir: pathlib.Path
    name: str
    source_model: pathlib.Path
    target_model: pathlib.Path
    max_pieces: int | None


@dataclasses.dataclass(frozen=True)
class SideStatistics:
    """What a side's text became.

    Attributes:
        lengths: int64 [longest + 1], the sentences of each length in pieces, EOS included.
        num_words: separated by white space.
        num_characters: without white space.
        num_byte_pieces: pieces that stand for a byte of a character that has no piece.
        num_unknown: the unknown id.
    """

    lengths: np.ndarray
    num_words: int
    num_characters: int
    num_byte_pieces: int
    num_unknown: int

    @property
    def num_sentences(self) -> int:
        """All sentences."""
        return int(self.lengths.sum())

    @property
    def num_pieces(self) -> int:
        """All pieces, an EOS for each sentence included."""
        return int(self.lengths @ np.arange(len(self.lengths)))

    def __add__(self, other: "SideStatistics") -> "SideStatistics":
        lengths = np.zeros(max(len(self.lengths), len(other.lengths)), np.int64)
        for addend in (self.lengths, other.lengths):
            lengths[: len(addend)] += addend
        return SideStatistics(
            lengths,
            self.num_words + other.num_words,
            self.num_characters + other.num_characters,
            self.num_byte_pieces + other.num_byte_pieces,
            self.num_unknown + other.num_unknown,
        )


NOTHING = SideStatistics(np.zeros(1, np.int64), 0, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A file of records, what it was made of, and the pairs dropped for their pieces."""

    shard: manifest.Shard
    source: SideStatistics
    target: SideStatistics
    num_too_long: int


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Ids of n sentences one after the other, EOS last in each, and int64 [n + 1] bounds."""

    ids: np.ndarray
    splits: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]."""
        return np.diff(self.splits)

    def select(self, is_kept: np.ndarray) -> "Tokens":
        """The sentences of a bool [n]."""
        splits = np.concatenate([[0], np.cumsum(self.lengths[is_kept])])
        return Tokens(self.ids[np.repeat(is_kept, self.lengths)], splits)


def encode(job: EncodeJob) -> Encoded:
    """Writes one file of records, and that of their lengths."""
    encoder = _Encoder(job)
    paths = f"{job.name}.array_record", f"{job.name}.lengths.npy"
    num_examples = records.write(job.data_dir / paths[0], encoder.records())
    np.save(job.data_dir / paths[1], encoder.lengths())
    file, lengths = (manifest.describe_file(job.data_dir, path) for path in paths)
    shard = manifest.Shard(file, lengths, num_examples)
    return Encoded(shard, encoder.source, encoder.target, encoder.num_too_long)


class _Encoder:
    """Makes a job's records, and counts as it goes."""

    def __init__(self, job: EncodeJob) -> None:
        self._job = job
        self.source = self.target = NOTHING
        self.num_too_long = 0
        self._lengths: list[np.ndarray] = []

    def lengths(self) -> np.ndarray:
        """Tokens of both sides of each record so far, unsigned [n, 2]."""
        found = np.concatenate([np.empty((0, 2), np.int64), *self._lengths])
        return found.astype(np.min_scalar_type(found.max(initial=0)))

    def records(self) -> Iterator[bytes]:
        job = self._job
        batches = _batches(_text(job.chunks))
        for pairs, source, target in tokenize(batches, job.source_model, job.target_model):
            if job.max_pieces is not None:
                is_short = np.maximum(source.lengths, target.lengths) <= job.max_pieces
                self.num_too_long += int((~is_short).sum())
                source, target = source.select(is_short), target.select(is_short)
                pairs = list(itertools.compress(pairs, is_short.tolist()))
            self.source += _statistics([p.source for p in pairs], source, job.source_model)
            self.target += _statistics([p.english for p in pairs], target, job.target_model)
            self._lengths.append(np.stack([source.lengths, target.lengths], axis=1))
            yield from example_codec.encode_batch(
                source.ids, source.splits, target.ids, target.splits
            )


def tokenize(
    batches: Iterator[list[tsv.Pair]], source_model: pathlib.Path, target_model: pathlib.Path
) -> Iterator[tuple[list[tsv.Pair], Tokens, Tokens]]:
    """Yields each batch, in order, and the tokens of its two sides; threads work ahead."""
    tf = _tensorflow()
    source_tokenizer, target_tokenizer = _tokenizer(source_model), _tokenizer(target_model)

    ahead: collections.deque[list[tsv.Pair]] = collections.deque()

    def texts():  # Runs in a thread of TensorFlow's.
        for pairs in batches:
            ahead.append(pairs)
            yield [pair.source for pair in pairs], [pair.english for pair in pairs]

    def ragged(source, target):
        sides = (source_tokenizer.tokenize(source), target_tokenizer.tokenize(target))
        return tuple((side.flat_values, side.row_splits) for side in sides)

    strings = tf.TensorSpec([None], tf.string)
    data = tf.data.Dataset.from_generator(texts, output_signature=(strings, strings))
    data = data.map(ragged, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    for source, target in data.prefetch(1).as_numpy_iterator():
        yield ahead.popleft(), Tokens(*source), Tokens(*target)


def _tensorflow() -> Any:
    """TensorFlow, loaded by the processes that tokenize and by no other, and without its news."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow

    return tensorflow


@functools.lru_cache(maxsize=2)
def _tokenizer(model: pathlib.Path) -> "tensorflow_text.SentencepieceTokenizer":
    import tensorflow_text

    return tensorflow_text.SentencepieceTokenizer(model=model.read_bytes(), add_eos=True)


@functools.lru_cache(maxsize=2)
def _byte_pieces(model: pathlib.Path) -> np.ndarray:
    """Whether each id stands for a byte, bool [vocabulary size]."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return np.array([processor.is_byte(i) for i in range(processor.get_piece_size())])


def _statistics(texts: Sequence[str], tokens: Tokens, model: pathlib.Path) -> SideStatistics:
    words = [text.split() for text in texts]
    return SideStatistics(
        lengths=np.bincount(tokens.lengths, minlength=1).astype(np.int64),
        num_words=sum(map(len, words)),
        num_characters=sum(len(word) for text in words for word in text),
        num_byte_pieces=int(_byte_pieces(model)[tokens.ids].sum()),
        num_unknown=int((tokens.ids == example_codec.UNK_ID).sum()),
    )


def _text(members: Sequence[chunks.Chunk]) -> Iterator[tsv.Pair]:
    for chunk in members:
        if chunk.split == "train":
            yield from chunk.kept_pairs()
        else:  # Kept as it was.
            yield from map(cleaning.normalize_pair, chunk.pairs())


def _batches(pairs: Iterator[tsv.Pair]) -> Iterator[list[tsv.Pair]]:
    while batch := list(itertools.islice(pairs, _PAIRS_PER_BATCH)):
        yield batch
