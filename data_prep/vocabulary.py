"""Trains the two SentencePiece vocabularies: one for all sources, one for all targets.

After the special ids (example_codec.py) come pieces for the bytes, so that any text can be encoded.
The models are byte-identical between runs: the text is drawn with a fixed seed, and the number of
threads, on which the order of floating-point sums depends, is constant.
"""

import enum
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import sentencepiece
from absl import logging

from data_prep import chunks, directions, tsv
from data_prep.chunks import Chunk
from data_prep.config import BuildConfig
from lingvo_gshard.files import atomic_file, digests
from lingvo_gshard.input import manifest
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, UNK_ID

_NUM_THREADS = 2
_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: spreads numbers that differ in few bits.
Side = enum.StrEnum("Side", ["SOURCE", "TARGET"])  # Of a pair; each has a vocabulary.


def quotas(counts: Sequence[int], max_sentences: int, temperature: float) -> list[int]:
    """Returns how many sentences of each language to draw: in proportion to n**(1/T).

    Their sum is that of all sentences, at most `max_sentences`; small languages may be repeated.
    """
    budget = min(max_sentences, sum(counts))
    weights = [count ** (1 / temperature) if count else 0.0 for count in counts]
    return [round(budget * weight / sum(weights)) for weight in weights]


def draw(
    members: Sequence[Chunk], num_kept: int, quota: int, seed: int, path: pathlib.Path
) -> None:
    """Draws pairs of a group of chunks, in one pass, and writes them to `path`.

    Of the `num_kept` pairs in all groups, about `quota` are drawn; see `num_copies`.
    """
    with (
        atomic_file.replacing(path, is_shared=True) as partial,
        partial.open("w", encoding="utf-8", newline="\n") as file,
    ):
        for chunk in members:
            digests = chunk.digests()[chunk.is_kept(), chunks.PAIR]
            copies = num_copies(digests, quota / max(num_kept, 1), seed)
            for pair, number in zip(chunk.kept_pairs(), copies.tolist(), strict=True):
                file.write(pair.line * number)


def num_copies(digests: np.ndarray, rate: float, seed: int) -> np.ndarray:
    """Returns how often to draw each pair, int64 [n]: floor or ceil of `rate`, and that on average.

    `digests` are evenly distributed hashes of the pairs, uint64 [n]. The seed decides which pairs
    get one copy more than the others.
    """
    with np.errstate(over="ignore"):
        mixed = (digests ^ np.uint64(seed)) * np.uint64(_ODD)
    # A product's high bits depend on all bits of its factors.
    return (math.floor(rate) + (mixed / 2.0**64 < rate % 1)).astype(np.int64)


def train_drawn(
    drawn: Sequence[tuple[str, pathlib.Path]],
    config: BuildConfig,
    data_dir: pathlib.Path,
    side: Side,
) -> manifest.Vocabulary:
    """Trains a side's vocabulary on the files `drawn`, each with its language; see `train`."""
    turned = [(one, file) for code, file in drawn for one in directions.of(code, config.directions)]
    tokens = sorted({one.token for one, _ in turned} - {""}) if side is Side.SOURCE else []
    sentences: Iterable[str] = (
        one.turned(pair)[side is Side.TARGET]
        for one, file in turned
        for pair in tsv.read(file)
        if isinstance(pair, tsv.Pair)
    )
    if side is Side.TARGET and config.directions == "many_to_english":
        sentences = dict.fromkeys(sentences)  # Many languages share sentences, which count once.
    path = f"vocab/{side}.model"
    size = train(side, sentences, config, data_dir / path, tokens)
    return manifest.Vocabulary(digests.describe(data_dir, path), size)


def train(
    side: Side,
    sentences: Iterable[str],
    config: BuildConfig,
    path: pathlib.Path,
    tokens: Sequence[str] = (),
) -> int:
    """Trains a side's vocabulary, writes it to `path` and returns its size.

    Each of the `tokens` is a piece, and sentences begin with them. A text of few pieces makes a
    smaller vocabulary. Raises ValueError for a size too small for the characters, or no text.
    """
    # The first word after a token has the space that follows it, and needs no other.
    options: dict[str, Any] = {"add_dummy_prefix": False} if tokens else {}
    logging.info("training the %s vocabulary", side)
    wanted = config.source_vocab_size if side is Side.SOURCE else config.target_vocab_size
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            atomic_file.replacing(path, is_shared=True) as partial,
            partial.open("wb") as model,
        ):
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=wanted,
                model_type=config.model_type,
                character_coverage=config.character_coverage,
                normalization_rule_name="nfkc",
                user_defined_symbols=tokens,
                **options,
                byte_fallback=True,
                hard_vocab_limit=False,
                pad_id=PAD_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                unk_id=UNK_ID,
                num_threads=_NUM_THREADS,
                minloglevel=2,
            )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        problem = f"the {side} vocabulary of {wanted} pieces cannot be trained"
        raise ValueError(f"{problem}: {reason}") from error
    size = sentencepiece.SentencePieceProcessor(model_file=str(path)).get_piece_size()
    if size != wanted:
        logging.warning("%s vocabulary: the text gives only %d of %d pieces", side, size, wanted)
    return size
