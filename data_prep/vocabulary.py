"""Trains the two SentencePiece vocabularies: one for all sources, one for all targets.

After the special ids (example_codec.py) come pieces for the bytes, so that any text can be encoded.
The models are byte-identical between runs: the text is drawn with a fixed seed, and the number of
threads, on which the order of floating-point sums depends, is constant.
"""

import enum
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece
from absl import logging

from data_prep import directions, text_chunks, tsv
from data_prep.config import BuildConfig
from data_prep.directions import Direction
from data_prep.text_chunks import Chunk
from lingvo_gshard.files import atomic_file, digests
from lingvo_gshard.input import manifest
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, UNK_ID

_NUM_THREADS = 2
_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: spreads numbers that differ in few bits.


class Side(enum.StrEnum):
    """A side of a pair in a direction of translation. Each has a vocabulary."""

    SOURCE = enum.auto()
    TARGET = enum.auto()


def quotas(counts: Sequence[int], max_sentences: int, temperature: float) -> list[int]:
    """Returns how many sentences of each language to draw: in proportion to n**(1/T).

    They add up to the number of all sentences, but at most to `max_sentences`. Those of small
    languages may be repeated.
    """
    budget = min(max_sentences, sum(counts))
    weights = [count ** (1 / temperature) if count else 0.0 for count in counts]
    return [round(budget * weight / sum(weights)) for weight in weights]


def draw(chunks: Sequence[Chunk], num_kept: int, quota: int, seed: int, path: pathlib.Path) -> None:
    """Draws pairs of a group of chunks, in one pass, and writes them to `path`.

    About `quota` of the `num_kept` pairs in all groups are drawn; see `num_copies`.
    """
    rate = quota / max(num_kept, 1)
    with (
        atomic_file.replacing(path, is_shared=True) as partial,
        partial.open("w", encoding="utf-8", newline="\n") as file,
    ):
        for chunk in chunks:
            pair_digests = chunk.digests()[chunk.is_kept(), text_chunks.PAIR]
            copies = num_copies(pair_digests, rate, seed)
            for pair, number in zip(chunk.kept_pairs(), copies.tolist(), strict=True):
                file.write(pair.line * number)


def num_copies(pair_digests: np.ndarray, rate: float, seed: int) -> np.ndarray:
    """Returns how often to draw each pair, int64 [n]: floor or ceil of `rate`, and that on average.

    `pair_digests` are evenly distributed hashes of the pairs, uint64 [n]. The seed decides which
    pairs get one copy more than the others.
    """
    with np.errstate(over="ignore"):
        mixed = (pair_digests ^ np.uint64(seed)) * np.uint64(_ODD)
    # A product's high bits depend on all bits of its factors.
    positions = mixed / 2.0**64  # From 0 to 1.
    gets_one_more = positions < rate % 1
    return (math.floor(rate) + gets_one_more).astype(np.int64)


def train_drawn(
    drawn: Sequence[tuple[str, pathlib.Path]],
    config: BuildConfig,
    data_dir: pathlib.Path,
    side: Side,
) -> manifest.Vocabulary:
    """Trains a side's vocabulary on the files `drawn`, each with its language; see `train`."""
    # Each file is read once for each direction of its language.
    files: list[tuple[Direction, pathlib.Path]] = []
    for language, path in drawn:
        files += [(direction, path) for direction in directions.of(language, config.directions)]

    # The tokens that name target languages are pieces of the source vocabulary.
    tokens: list[str] = []
    if side is Side.SOURCE:
        tokens = sorted({direction.token for direction, _ in files} - {""})

    sentences: Iterable[str] = _sentences(files, side)
    if side is Side.TARGET and config.directions == "many_to_english":
        sentences = dict.fromkeys(sentences)  # Many languages share sentences, which count once.

    model = f"vocab/{side}.model"
    size = train(side, sentences, config, data_dir / model, tokens)
    return manifest.Vocabulary(digests.describe(data_dir, model), size)


def _sentences(files: Iterable[tuple[Direction, pathlib.Path]], side: Side) -> Iterator[str]:
    """Yields one side of every pair in some files, each read in a direction."""
    for direction, path in files:
        for pair in tsv.read(path):
            if isinstance(pair, tsv.Pair):
                source, target = direction.turned(pair)
                yield source if side is Side.SOURCE else target


def train(
    side: Side,
    sentences: Iterable[str],
    config: BuildConfig,
    path: pathlib.Path,
    tokens: Sequence[str] = (),
) -> int:
    """Trains a side's vocabulary, writes it to `path` and returns its size.

    Each of the `tokens` is a piece, and sentences begin with them. A text of few pieces makes a
    smaller vocabulary. Raises ValueError if the size is too small for the characters, or there is
    no text.
    """
    logging.info("training the %s vocabulary", side)
    wanted_size = config.target_vocab_size
    if side is Side.SOURCE:
        wanted_size = config.source_vocab_size

    prefix_options: dict[str, Any] = {}  # A default that is named would change the model's bytes.
    if tokens:
        # The first word after a token has the space that follows it, and needs no other.
        prefix_options["add_dummy_prefix"] = False

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            atomic_file.replacing(path, is_shared=True) as partial,
            partial.open("wb") as model,
        ):
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=wanted_size,
                model_type=config.model_type,
                character_coverage=config.character_coverage,
                normalization_rule_name="nfkc",
                user_defined_symbols=list(tokens),  # The library takes no tuple.
                **prefix_options,
                byte_fallback=True,
                hard_vocab_limit=False,  # A text may have fewer pieces.
                pad_id=PAD_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                unk_id=UNK_ID,
                num_threads=_NUM_THREADS,
                minloglevel=2,
            )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        problem = f"the {side} vocabulary of {wanted_size} pieces cannot be trained"
        raise ValueError(f"{problem}: {reason}") from error

    # The library does not tell the size that came of it.
    size = sentencepiece.SentencePieceProcessor(model_file=str(path)).get_piece_size()
    if size != wanted_size:
        logging.warning(
            "%s vocabulary: the text gives only %d of %d pieces", side, size, wanted_size
        )
    return size
