"""Training the two SentencePiece vocabularies: one for all sources together, one for English.

Special ids are the same in both: pad 0, bos 1, eos 2, unk 3. Byte pieces follow them, so that any
text can be written. The models are byte-identical between runs: the text is drawn with a fixed
seed, and the number of threads, on which the order of floating-point sums depends, is constant.
"""

import dataclasses
import enum
import io
import math
import os
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece
from absl import logging

from data_prep import chunks, tsv
from data_prep.chunks import Chunk

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
_NUM_THREADS = 2
_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: spreads what differs in few bits.
# The four special ids and the 256 byte pieces.
_MIN_SIZE = 4 + 256 + 1


class Side(enum.StrEnum):
    """Of a pair, and the vocabulary's name."""

    SOURCE = "source"
    TARGET = "target"


@dataclasses.dataclass(frozen=True)
class VocabularyConfig:
    """How a vocabulary is trained. `size` in pieces; `model_type` is "bpe" or "unigram"."""

    size: int
    model_type: str
    character_coverage: float
    max_sentences: int
    temperature: float


def quotas(counts: Sequence[int], config: VocabularyConfig) -> list[int]:
    """How many sentences of each language to draw: proportional to n**(1/T).

    A small language's quota may exceed its sentences; they then repeat.
    """
    budget = min(config.max_sentences, sum(counts))
    weights = [count ** (1 / config.temperature) if count else 0.0 for count in counts]
    return [round(budget * weight / sum(weights)) for weight in weights]


@dataclasses.dataclass(frozen=True)
class DrawJob:
    """`quota` of a language's `num_kept` selected pairs, to be written to `path`."""

    chunks: Sequence[Chunk]
    num_kept: int
    quota: int
    seed: int
    path: pathlib.Path


def draw(job: DrawJob) -> pathlib.Path:
    """Draws pairs, evenly repeated, by their digests: so many in expectation, in one reading."""
    with job.path.open("w", encoding="utf-8", newline="\n") as file:
        for chunk in job.chunks:
            digests = chunk.digests()[np.load(chunk.kept_path), chunks.PAIR]
            copies = num_copies(digests, job.quota / max(job.num_kept, 1), job.seed)
            for pair, number in zip(chunk.kept_pairs(), copies.tolist(), strict=True):
                file.write(tsv.line_of(pair) * number)
    return job.path


def num_copies(digests: np.ndarray, rate: float, seed: int) -> np.ndarray:
    """How often each pair occurs, int64 [n]: floor or ceil of `rate`, and `rate` on average.

    Args:
        digests: uint64 [n], evenly spread.
        rate: copies of a pair in expectation.
        seed: which pairs occur once more than the others.
    """
    with np.errstate(over="ignore"):
        mixed = (digests ^ np.uint64(seed)) * np.uint64(_ODD)
    # A product's high bits depend on all of the bits.
    return (math.floor(rate) + (mixed / 2.0**64 < rate % 1)).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """A vocabulary to be trained on one side of the pairs that `draw` wrote to `drawn`."""

    side: Side
    drawn: Sequence[pathlib.Path]
    config: VocabularyConfig
    path: pathlib.Path


def train_drawn(job: TrainJob) -> int:
    """Trains a vocabulary; returns its size. Raises ValueError as `train`."""
    pairs = (pair for path in job.drawn for pair in tsv.read(path) if isinstance(pair, tsv.Pair))
    if job.side is Side.SOURCE:
        sentences: Iterable[str] = (pair.source for pair in pairs)
    else:
        # Many languages share their English; once is enough.
        sentences = dict.fromkeys(pair.english for pair in pairs)
    return train(job.side, sentences, job.config, job.path)


def train(name: str, sentences: Iterable[str], config: VocabularyConfig, path: pathlib.Path) -> int:
    """Trains one vocabulary, writes it to `path` and returns its size.

    Where the text has too few different pieces for the asked size the vocabulary is smaller, which
    is logged.

    Raises:
        ValueError: the size cannot hold even the characters, or the text holds nothing.
    """
    if config.size < _MIN_SIZE:
        raise ValueError(
            f"{name} vocabulary size {config.size}: expected at least {_MIN_SIZE} "
            "(special ids, bytes and a character)"
        )
    model = io.BytesIO()
    logging.info("training the %s vocabulary", name)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=config.size,
            model_type=config.model_type,
            character_coverage=config.character_coverage,
            normalization_rule_name="nfkc",
            byte_fallback=True,
            hard_vocab_limit=False,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the {name} vocabulary of {config.size} pieces cannot be trained: {reason}"
        ) from error
    size = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    if size != config.size:
        logging.warning(
            "%s vocabulary: the text has only %d pieces, %d asked", name, size, config.size
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(model.getvalue())
    os.replace(unfinished, path)
    return size
