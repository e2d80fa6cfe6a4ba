"""Trains the two SentencePiece vocabularies: one for all source languages, one for English.

After the special ids (example_codec.py) come pieces for the bytes, so that any text can be encoded.
The models are byte-identical between runs: the text is drawn with a fixed seed, and the number of
threads, on which the order of floating-point sums depends, is constant. Memory depends on the
number of sentences drawn, not on the corpus.
"""

import enum
import io
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece
from absl import logging

from data_prep import chunks, cleaning, tsv
from data_prep.chunks import Chunk
from data_prep.config import BuildConfig
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, UNK_ID

_NUM_THREADS = 2
_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: spreads numbers that differ in few bits.


class Side(enum.StrEnum):
    """A side of a pair, and the name of its vocabulary."""

    SOURCE = "source"
    TARGET = "target"


def quotas(counts: Sequence[int], max_sentences: int, temperature: float) -> list[int]:
    """Returns how many sentences of each language to draw: in proportion to n**(1/T).

    Their sum is the number of all sentences, but at most `max_sentences`. If a small language's
    quota exceeds its sentences, they are repeated.
    """
    budget = min(max_sentences, sum(counts))
    weights = [count ** (1 / temperature) if count else 0.0 for count in counts]
    return [round(budget * weight / sum(weights)) for weight in weights]


def draw(
    members: Sequence[Chunk], num_kept: int, quota: int, seed: int, path: pathlib.Path
) -> pathlib.Path:
    """Draws about `quota` of the `num_kept` selected pairs of a language's chunks, in one pass.

    Writes them to `path` and returns it. The seed decides as in num_copies.
    """
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for chunk in members:
            digests = chunk.digests()[np.load(chunk.kept_path), chunks.PAIR]
            copies = num_copies(digests, quota / max(num_kept, 1), seed)
            for pair, number in zip(chunk.kept_pairs(), copies.tolist(), strict=True):
                file.write(pair.line * number)
    return path


def num_copies(digests: np.ndarray, rate: float, seed: int) -> np.ndarray:
    """Returns how often to draw each pair, int64 [n]: floor or ceil of `rate`.

    Args:
        digests: evenly distributed hashes of the pairs, uint64 [n].
        rate: the expected number of copies of a pair.
        seed: decides which pairs get one copy more than the others.
    """
    with np.errstate(over="ignore"):
        mixed = (digests ^ np.uint64(seed)) * np.uint64(_ODD)
    # A product's high bits depend on all bits of its factors.
    return (math.floor(rate) + (mixed / 2.0**64 < rate % 1)).astype(np.int64)


def train_drawn(
    side: Side, drawn: Sequence[pathlib.Path], config: BuildConfig, path: pathlib.Path
) -> int:
    """Trains a side's vocabulary on the pairs in the files `drawn`. See `train`."""
    pairs = (pair for file in drawn for pair in tsv.read(file) if isinstance(pair, tsv.Pair))
    if side is Side.SOURCE:
        return train(side, (pair.source for pair in pairs), config, path)
    # Many languages share English sentences, which count once.
    return train(side, _distinct(pair.english for pair in pairs), config, path)


def _distinct(sentences: Iterable[str]) -> Iterator[str]:
    """Yields each sentence once, in order; memory holds 64 bits of each."""
    seen: set[int] = set()
    for sentence in sentences:
        digest = cleaning.digest(sentence)
        if digest not in seen:
            seen.add(digest)
            yield sentence


def train(side: Side, sentences: Iterable[str], config: BuildConfig, path: pathlib.Path) -> int:
    """Trains a side's vocabulary, writes it to `path` and returns its size.

    If the text has too few different pieces, the vocabulary is smaller than configured. This is
    logged.

    Raises:
        ValueError: the size is too small for the characters, or the text is empty.
    """
    model = io.BytesIO()
    logging.info("training the %s vocabulary", side)
    wanted = config.source_vocab_size if side is Side.SOURCE else config.target_vocab_size
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=wanted,
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
            f"the {side} vocabulary of {wanted} pieces cannot be trained: {reason}"
        ) from error
    size = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    if size != wanted:
        logging.warning("%s vocabulary: the text has only %d pieces, %d asked", side, size, wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return size
