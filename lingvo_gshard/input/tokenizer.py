"""Converts text to token ids and back, by a SentencePiece model with this project's special ids.

A vocabulary from elsewhere (fairseq_vocabulary.py) may name languages: by control pieces, which no
text spells, named as LANGUAGE has it. Its last pieces have no rows in a model's tables: END, and
after it what the vocabulary records about itself, and pieces that become unknown.
"""

import functools
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece

from lingvo_gshard.files import digests
from lingvo_gshard.input import manifest
from lingvo_gshard.input.example_codec import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    literal_parts,
    target_token,
)
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.normalization import SPACE, Normalization

# The tokens of languages, by their codes: deu_Latn, or __de__ of de.
LANGUAGE = re.compile(r"(?P<code>[a-z]{3}_[A-Z][a-z]{3})|__(?P<short>[A-Za-z-]+)__")
END = "<end of the table>"
_HALF = "\u00bd"  # NFKC makes three characters of it.


class Tokenizer:
    """One vocabulary: pad 0, bos 1, eos 2, unk 3. Bytes spell any text that has no pieces."""

    def __init__(self, model_file: str | os.PathLike[str]):
        """Loads a model. Raises ValueError if it is missing, damaged or has other special ids."""
        if not pathlib.Path(model_file).is_file():
            raise ValueError(f"{model_file}: there is no such vocabulary")
        try:
            processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{model_file} is not a SentencePiece model: {error}") from error

        # Records and decoding rely on the same special ids in every vocabulary.
        ids = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        expected = (PAD_ID, BOS_ID, EOS_ID, UNK_ID)
        if ids != expected:
            raise ValueError(f"{model_file} has pad, bos, eos, unk {ids}, expected {expected}")
        self._processor = processor

        # A piece that is missing has the unknown id.
        end = processor.piece_to_id(END)
        self._size = processor.get_piece_size() if end == UNK_ID else end
        self._normalization = _form_of(processor)

    @property
    def vocab_size(self) -> int:
        """The number of pieces that a model has rows for, including the special ids."""
        return self._size

    @functools.cached_property
    def languages(self) -> dict[str, int]:
        """The ids of the tokens of languages, by their codes; none of most vocabularies."""
        ids: dict[str, int] = {}
        for token in range(UNK_ID + 1, self.vocab_size):
            if self._processor.is_control(token):
                match = LANGUAGE.fullmatch(self._processor.id_to_piece(token))
                if match is not None:
                    ids[match["code"] or match["short"]] = token
        return ids

    @property
    def normalization(self) -> Normalization:
        """What is done to text before the model."""
        return self._normalization

    def normalize(self, text: str) -> str:
        """Returns the text in the form that the vocabulary was trained on."""
        return self._normalization.of(text)

    @property
    def targets(self) -> tuple[str, ...]:
        """The codes of the languages that sources name as their targets: see `target_token`."""
        codes: list[str] = []
        for token in range(UNK_ID + 1, self.vocab_size):  # They follow the special ids.
            match = re.fullmatch("<2(.+)>", self._processor.id_to_piece(token))
            if match is None:
                break
            codes.append(match[1])
        return tuple(codes)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a sentence in normal form, EOS last.

        Only at its beginning is the token of a target language a token; elsewhere it is text.
        """
        (ids,) = self.encode_all([text])
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of sentences as `encode`, in less time."""
        parts_by_text = [literal_parts(text, self._tokens) for text in texts]
        all_parts = list(itertools.chain.from_iterable(parts_by_text))
        remaining = iter(self._processor.encode(all_parts))

        ids_by_text: list[list[int]] = []
        for parts in parts_by_text:
            ids_of_parts = itertools.islice(remaining, len(parts))
            ids = list(itertools.chain.from_iterable(ids_of_parts))
            ids_by_text.append([*self._with_rows(ids), EOS_ID])
        return ids_by_text

    @functools.cached_property
    def _tokens(self) -> tuple[str, ...]:
        return tuple(map(target_token, self.targets))

    def _with_rows(self, ids: list[int]) -> list[int]:
        """Returns ids with the unknown one in place of those that have no row."""
        if self._size == self._processor.get_piece_size():
            return ids
        return [token if token < self._size else UNK_ID for token in ids]

    def num_byte_pieces(self, ids: Sequence[int]) -> int:
        """Returns how many of the ids are those of bytes."""
        return sum(self._processor.is_byte(list(ids)))

    def num_bytes(self) -> np.ndarray:
        """Returns how many bytes of text, in UTF-8, each piece stands for, int32 [vocab_size].

        A piece that begins a word counts the space before it, which the first one of a text lacks.
        """
        num_bytes = np.zeros(self.vocab_size, np.int32)
        for token in range(UNK_ID + 1, self.vocab_size):  # Special ids stand for none.
            if self._processor.is_byte(token):
                num_bytes[token] = 1
            else:
                text = self._processor.id_to_piece(token).replace(SPACE, " ")
                num_bytes[token] = len(text.encode())
        return num_bytes

    def begins_with_space(self) -> np.ndarray:
        """Returns whether each piece begins a word, bool [vocab_size]."""
        pieces = self.pieces(range(self.vocab_size))
        return np.array([piece.startswith(SPACE) for piece in pieces])

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns the vocabulary's piece for each id."""
        return [self._processor.id_to_piece(int(token)) for token in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text up to the first EOS, ignoring padding and BOS."""
        tokens: list[int] = []
        for token in map(int, ids):
            if token == EOS_ID:
                break
            if token not in (PAD_ID, BOS_ID):
                tokens.append(token)
        return self._processor.decode(tokens)


def _form_of(processor: sentencepiece.SentencePieceProcessor) -> Normalization:
    """Returns what is done to text before a model."""
    if processor.piece_to_id(recorded(Normalization.MODEL)) != UNK_ID:
        return Normalization.MODEL
    # A model of what is read has NFKC in it, as all of ours had once.
    keeps_form = processor.decode(processor.encode(_HALF)) == _HALF
    return Normalization.NFC if keeps_form else Normalization.NFKC


def recorded(normalization: Normalization) -> str:
    """Returns the piece past the table by which a vocabulary records its normalization."""
    return f"<normalization: {normalization}>"


def load_pair(data_dir: str | os.PathLike[str]) -> tuple[Tokenizer, Tokenizer]:
    """Returns a data folder's source and target tokenizers; raises as manifest.load and verify."""
    files = manifest.load(data_dir).vocabulary_files
    digests.verify(data_dir, files)
    source, target = (Tokenizer(digests.local(data_dir, file)) for file in files)
    return source, target


def vocabulary_files(
    folder: str | pathlib.Path, kind: str | None
) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of the source and target SentencePiece models of a bundle or a run.

    With data of kind TEXT, both are the one vocabulary.
    """
    vocab = pathlib.Path(folder, "vocab")
    if kind == Kind.TEXT:
        return vocab / "text.model", vocab / "text.model"
    return vocab / "source.model", vocab / "target.model"
