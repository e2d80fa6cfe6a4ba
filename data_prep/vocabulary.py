"""Training the two SentencePiece vocabularies: one for all sources together, one for English.

Special ids are the same in both: pad 0, bos 1, eos 2, unk 3. Byte pieces follow them, so that any
text can be written. The models are byte-identical between runs: the text is drawn with a fixed
seed, and the number of threads, on which the order of floating-point sums depends, is constant.
"""

import dataclasses
import io
import pathlib
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

import sentencepiece
from absl import logging

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
_T = TypeVar("_T")
_NUM_THREADS = 2
# The four special ids and the 256 byte pieces.
_MIN_SIZE = 4 + 256 + 1


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


def draw(sentences: Sequence[_T], quota: int, rng: random.Random) -> list[_T]:
    """Draws `quota` sentences; each occurs floor or ceil of quota / len(sentences) times."""
    if not sentences:
        return []
    repeats, rest = divmod(quota, len(sentences))
    return list(sentences) * repeats + rng.sample(sentences, rest)


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
    path.write_bytes(model.getvalue())
    return size
