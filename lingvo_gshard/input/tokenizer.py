"""Converts text to token ids and back, by a SentencePiece model with this project's special ids.

An imported vocabulary (fairseq_vocabulary.py) may name languages by control pieces, which text
never produces. Their names match LANGUAGE, or are recorded. The last pieces of the vocabulary have
no rows in a model's tables: END, then the vocabulary's records about itself, then pieces that
become unknown.

    <normalization: model>    text is not normalized before the model
    <language: nds>           the control piece `nds` is the token of a language
    <added: GShard>           this text is a token wherever it occurs; see `Tokenizer.encode`
"""

import functools
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import sentencepiece

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

# The tokens of languages: codes such as deu_Latn, or __de__ for the code de.
LANGUAGE = re.compile(r"(?P<code>[a-z]{3}_[A-Z][a-z]{3})|__(?P<short>[A-Za-z-]+)__")
END = "<end of the table>"
_RECORD = re.compile(r"<(normalization|language|added): (.*)>", re.DOTALL)
_HALF = "\u00bd"  # NFKC turns it into three characters.


class Tokenizer:
    """One vocabulary: pad 0, bos 1, eos 2, unk 3. Text without pieces is spelled in bytes."""

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

        # piece_to_id returns the unknown id for a missing piece.
        end = processor.piece_to_id(END)
        # The number of pieces with rows in a model's tables, including the special ids.
        self.vocab_size = processor.get_piece_size() if end == UNK_ID else end
        self.normalization = _form_of(processor)  # The normalization of text before the model.
        self._recorded = self._records()

    def _records(self) -> dict[str, list[str]]:
        """Returns the vocabulary's records about itself, by their kind."""
        records: dict[str, list[str]] = {"language": [], "added": []}
        for token in range(self.vocab_size + 1, self._processor.get_piece_size()):
            match = _RECORD.fullmatch(self._processor.id_to_piece(token))
            if match is None or not self._processor.is_control(token):
                break  # The records end; pieces follow.
            records.setdefault(match[1], []).append(match[2])
        return records

    @functools.cached_property
    def languages(self) -> dict[str, int]:
        """The ids of the tokens of languages, by code; empty for most vocabularies."""
        recorded_names = set(self._recorded["language"])
        ids: dict[str, int] = {}
        for token in range(UNK_ID + 1, self.vocab_size):
            if self._processor.is_control(token):
                name = self._processor.id_to_piece(token)
                if LANGUAGE.fullmatch(name) or name in recorded_names:
                    ids[language_code(name)] = token
        return ids

    @functools.cached_property
    def added(self) -> dict[str, int]:
        """The ids of texts that a user made tokens; empty for most vocabularies."""
        return {name: self._processor.piece_to_id(name) for name in self._recorded["added"]}

    def normalize(self, text: str) -> str:
        """Returns the text in the form that the vocabulary was trained on."""
        return self.normalization.of(text)

    @property
    def targets(self) -> tuple[str, ...]:
        """The codes of the target languages that sources can name: see `target_token`."""
        codes: list[str] = []
        for token in range(UNK_ID + 1, self.vocab_size):  # Their tokens follow the special ids.
            match = re.fullmatch("<2(.+)>", self._processor.id_to_piece(token))
            if match is None:
                break
            codes.append(match[1])
        return tuple(codes)

    def prompt(self, text: str) -> list[int]:
        """Returns BOS and the ids of a text, like the beginning of a document in training."""
        return [BOS_ID, *self.encode(self.normalize(text))[:-1]]

    @property
    def adds_bos(self) -> bool:
        """Whether a text begins with BOS."""
        return bool(self.prompt(""))

    @property
    def unk_id(self) -> int:
        """The id of unknown pieces; -1 without one."""
        return UNK_ID

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Raises ValueError: only tokenizers of imported decoders have chat templates."""
        raise ValueError("its tokenizer has no chat template.")

    @property
    def of_chats(self) -> "Tokenizer":
        """The tokenizer of the texts of chats."""
        return self

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a normalized sentence, EOS last.

        A target language's token is a token only at the beginning; elsewhere it is text. An added
        token is a token wherever it occurs, and the texts on both sides of it are encoded
        separately.
        """
        (ids,) = self.encode_all([text])
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of several sentences; faster than calling `encode` for each."""
        parts_by_text = [self._parts(text) for text in texts]
        with_pieces = []
        for part in itertools.chain.from_iterable(parts_by_text):
            if part not in self.added:
                with_pieces.append(part)
        remaining = iter(self._processor.encode(with_pieces))

        ids_by_text: list[list[int]] = []
        for parts in parts_by_text:
            ids: list[int] = []
            for part in parts:
                ids += [self.added[part]] if part in self.added else next(remaining)
            ids_by_text.append([*self._with_rows(ids), EOS_ID])
        return ids_by_text

    def _parts(self, text: str) -> list[str]:
        """Returns a text in parts that are encoded separately; some of them are added tokens."""
        if not self.added:
            return literal_parts(text, self._tokens)
        return [part for part in self._added_pattern.split(text) if part]

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        """A pattern of the added tokens; at each place, it matches the longest one."""
        longest_first = sorted(self.added, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @functools.cached_property
    def _tokens(self) -> tuple[str, ...]:
        return tuple(map(target_token, self.targets))

    def _with_rows(self, ids: list[int]) -> list[int]:
        """Returns ids, with the unknown id in place of ids without rows."""
        if self.vocab_size == self._processor.get_piece_size():
            return ids
        return [token if token < self.vocab_size else UNK_ID for token in ids]

    def num_byte_pieces(self, ids: Sequence[int]) -> int:
        """Returns how many of the ids are pieces of single bytes."""
        return sum(self._processor.is_byte(list(ids)))

    def num_bytes(self) -> np.ndarray:
        """Returns how many bytes of text, in UTF-8, each piece represents, int32 [vocab_size].

        A piece that begins a word counts the space before it, although a text's first word has no
        space.
        """
        num_bytes = np.zeros(self.vocab_size, np.int32)
        for token in range(UNK_ID + 1, self.vocab_size):  # Special ids represent 0 bytes.
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
        """Returns the text up to the first EOS, without padding and BOS.

        An added token gets a space on both sides.
        """
        names = {token: name for name, token in self.added.items()}
        texts: list[str] = []
        tokens: list[int] = []
        for token in map(int, ids):
            if token == EOS_ID:
                break
            if token in names:
                texts += [self._processor.decode(tokens), names[token]]
                tokens = []
            elif token not in (PAD_ID, BOS_ID):
                tokens.append(token)
        texts.append(self._processor.decode(tokens))
        return " ".join(text for text in texts if text)


def _form_of(processor: sentencepiece.SentencePieceProcessor) -> Normalization:
    """Returns the normalization that a model expects."""
    if processor.piece_to_id(record("normalization", Normalization.MODEL)) != UNK_ID:
        return Normalization.MODEL
    # A model whose own rules include NFKC is for reading; all of our earlier models have them.
    keeps_form = processor.decode(processor.encode(_HALF)) == _HALF
    return Normalization.NFC if keeps_form else Normalization.NFKC


def language_code(name: str) -> str:
    """Returns the code of a language's token: `de` for __de__, and else the token itself."""
    match = LANGUAGE.fullmatch(name)
    return name if match is None else match["code"] or match["short"]


def record(kind: Literal["normalization", "language", "added"], value: str) -> str:
    """Returns the piece after the table by which a vocabulary records this about itself."""
    return f"<{kind}: {value}>"


def vocabulary_files(
    folder: str | pathlib.Path, kind: str | None
) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of the source and target vocabularies of a bundle or a run.

    For data of kind TEXT, both paths are the same.
    """
    vocab = pathlib.Path(folder, "vocab")
    if kind == Kind.TEXT:
        return vocab / "text.model", vocab / "text.model"
    return vocab / "source.model", vocab / "target.model"
