"""Trains the SentencePiece vocabularies: one for all sources, one for all targets; or one of text.

After the special ids (example_codec.py) come pieces for the bytes, so that any text can be encoded.
The models are byte-identical between runs: the text is drawn with a fixed seed, and the number of
threads, on which the order of floating-point sums depends, is constant.
"""

import enum
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece
from absl import logging

from data_prep import directions, text_chunks, tsv
from data_prep.config import BuildConfig
from data_prep.directions import Direction
from data_prep.text_chunks import Chunk
from lingvo_gshard.input import manifest
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, UNK_ID, literal_parts
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.normalization import Normalization
from xla_spmd.files import atomic_file, digests

_NUM_THREADS = 2
# SentencePiece skips longer texts, and texts with its own mark for unknown pieces.
_MAX_TEXT_BYTES = 4192
_UNKNOWN_MARK = "\u2585"
_MAX_SEGMENT_CHARS = 1000  # A character has at most four bytes.
_ODD = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads numbers that differ in only a few bits.


class Side(enum.StrEnum):
    """A side of a pair in a direction of translation, or a document. Each has a vocabulary."""

    SOURCE = enum.auto()
    TARGET = enum.auto()
    TEXT = enum.auto()


SIDES = {Kind.PARALLEL: (Side.SOURCE, Side.TARGET), Kind.TEXT: (Side.TEXT,)}


def quotas(counts: Sequence[int], max_sentences: int, temperature: float) -> list[int]:
    """Returns how many sentences of each language to draw: in proportion to n**(1/T).

    They add up to the number of all sentences, but to at most `max_sentences`. The sentences of
    small languages may be repeated.
    """
    budget = min(max_sentences, sum(counts))
    weights = [count ** (1 / temperature) if count else 0.0 for count in counts]
    return [round(budget * weight / sum(weights)) for weight in weights]


def draw(chunks: Sequence[Chunk], num_kept: int, quota: int, seed: int, path: pathlib.Path) -> None:
    """Draws examples of a group of chunks, in one pass, and writes them to `path`.

    About `quota` of the `num_kept` examples in all groups are drawn; see `num_copies`.
    """
    rate = quota / max(num_kept, 1)
    with (
        atomic_file.replacing(path, is_shared=True) as partial,
        partial.open("w", encoding="utf-8", newline="\n") as file,
    ):
        for chunk in chunks:
            kept_digests = chunk.digests()[chunk.is_kept(), text_chunks.PAIR]
            copies = num_copies(kept_digests, rate, seed)
            for example, number in zip(chunk.kept_examples(), copies.tolist(), strict=True):
                file.write(example.line * number)


def num_copies(hashes: np.ndarray, rate: float, seed: int) -> np.ndarray:
    """Returns how often to draw each example: floor or ceil of `rate`, and `rate` on average.

    `hashes` of the examples are evenly distributed, uint64 [n], and the result is int64 [n]. The
    seed decides which examples get one more copy than the others.
    """
    with np.errstate(over="ignore"):
        mixed = (hashes ^ np.uint64(seed)) * np.uint64(_ODD)
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
    # A file is read once for each direction of its language.
    files: list[tuple[Direction, pathlib.Path]] = []
    for language, path in drawn:
        files += [(direction, path) for direction in directions.of(language, config.directions)]

    # The tokens of target languages are pieces of the source vocabulary.
    tokens: list[str] = []
    if side is Side.SOURCE:
        tokens = sorted({direction.token for direction, _ in files} - {""})

    sentences: Iterable[str] = learnable(_sentences(files, side), tokens)
    if side is Side.TEXT:

        def read() -> Iterator[str]:
            return segments(_sentences(files, side))

        sentences = learnable(sample(read, config.max_vocab_sentences))
    if side is Side.TARGET and config.directions == "many_to_english":
        sentences = dict.fromkeys(sentences)  # Many languages share sentences, which count once.

    model = f"vocab/{side}.model"
    size = train(side, sentences, config, data_dir / model, tokens)
    return manifest.Vocabulary(digests.describe(data_dir, model), size)


def _sentences(files: Iterable[tuple[Direction, pathlib.Path]], side: Side) -> Iterator[str]:
    """Yields one side of every example in some files, each file read in one direction."""
    normalize = Normalization.NFKC.of if side is Side.SOURCE else Normalization.NFC.of
    for direction, path in files:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                sides = direction.record_sides(tsv.of_line(line))
                yield normalize(sides[0] if side is Side.SOURCE else sides[-1])


def learnable(texts: Iterable[str], tokens: Sequence[str] = ()) -> Iterator[str]:
    """Yields texts, some of them cut into parts, so that SentencePiece does not skip any.

    SentencePiece learns nothing from text that looks like one of the tokens, so this is cut, too.
    """
    for text in itertools.chain.from_iterable(literal_parts(text, tokens) for text in texts):
        if _UNKNOWN_MARK in text:
            # This character cannot be a piece: bytes spell it.
            text = text.replace(_UNKNOWN_MARK, " ")
        if len(text.encode()) > _MAX_TEXT_BYTES:
            yield from segments([text])
        else:
            yield text


def segments(documents: Iterable[str]) -> Iterator[str]:
    """Yields documents, cut at spaces into texts that are short enough for SentencePiece."""
    for document in documents:
        start = 0
        while len(document) - start > _MAX_SEGMENT_CHARS:
            end = document.rfind(" ", start + 1, start + _MAX_SEGMENT_CHARS)
            if end == -1:  # The language may be written without spaces.
                end = start + _MAX_SEGMENT_CHARS
            yield document[start:end]
            start = end
        yield document[start:]


def sample(read: Callable[[], Iterator[str]], most: int) -> Iterator[str]:
    """Yields all texts from `read`, or about `most` of them if there are more."""
    num_texts = sum(1 for _ in read())
    rate = min(1.0, most / max(num_texts, 1))
    for number, text in enumerate(read()):
        # Take the same share of every part of the stream.
        if math.floor((number + 1) * rate) > math.floor(number * rate):
            yield text


def train(
    side: Side,
    sentences: Iterable[str],
    config: BuildConfig,
    path: pathlib.Path,
    tokens: Sequence[str] = (),
) -> int:
    """Trains a side's vocabulary, writes it to `path` and returns its size.

    Each of the `tokens` is a piece, and sentences begin with them. A text with few distinct pieces
    gives a smaller vocabulary. Raises ValueError if the size is too small for the characters, or if
    there is no text.
    """
    logging.info("training the %s vocabulary", side)
    wanted_size: int = getattr(config, f"{side}_vocab_size")

    prefix_options: dict[str, Any] = {}  # Even passing the default would change the model's bytes.
    if tokens:
        # The first word already has a space before it, after the token.
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
                # See normalization.py: models read NFKC, and write text as it is.
                normalization_rule_name="nfkc" if side is Side.SOURCE else "identity",
                user_defined_symbols=list(tokens),  # The library does not accept a tuple.
                **prefix_options,
                byte_fallback=True,
                hard_vocab_limit=False,  # A text may have fewer distinct pieces.
                pad_id=PAD_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                unk_id=UNK_ID,
                num_threads=_NUM_THREADS,
                minloglevel=2,
            )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        required = re.search(r"required_chars\. \d+ vs (\d+)", reason)
        if required is not None:
            reason = f"the characters of its text need {required[1]}"
        problem = f"the {side} vocabulary of {wanted_size} pieces cannot be trained"
        raise ValueError(f"{problem}: {reason}") from error

    # The library does not return the resulting size.
    size = sentencepiece.SentencePieceProcessor(model_file=str(path)).get_piece_size()
    if size != wanted_size:
        logging.warning(
            "%s vocabulary: the text gives only %d of %d pieces", side, size, wanted_size
        )
    return size
