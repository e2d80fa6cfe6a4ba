"""Text to ids and back by a tokenizer of the `tokenizers` library, as imported decoders have one.

Its file is JSON:

    tokenizer         the contents of tokenizer.json
    vocab_size        the rows of the model's tables, of which some may have no token
    special_ids       the tokenizer's own ids of padding, BOS and EOS: here these are 0, 1 and 2,
                      and the tokens with these ids have their places
    special_tokens    if the tokenizer names them: texts by names such as bos_token
    chat_template     of a tokenizer with chats: see chat_template.py

The library is the extra `bpe`.
"""

import copy
import functools
import importlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from lingvo_gshard.input import manifest
from lingvo_gshard.input.example_codec import EOS_ID
from lingvo_gshard.input.normalization import SPACE, Normalization
from lingvo_gshard.input.tokenizer import Tokenizer
from xla_spmd.files import digests, json_records

# The names of a tokenizer's files in a folder of transformers.
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_BYTE = re.compile("<0x[0-9A-F]{2}>")  # A piece of one byte of a character without a piece.
_BYTE_LEVEL_SPACE = "\u0120"  # The character that stands for a space, where each is one byte.


def vocabulary(
    tokenizer: str,
    vocab_size: int,
    special_ids: Sequence[int],
    special_tokens: Mapping[str, str] | None = None,
    chat_template: str | None = None,
) -> bytes:
    """Returns the contents of a vocabulary's file, given the text of a tokenizer.json.

    Raises ValueError if it is not a tokenizer, or has ids beyond the tables.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_ids": list(special_ids),
        "tokenizer": json_records.parse(tokenizer),
    }
    if special_tokens is not None:
        fields["special_tokens"] = dict(special_tokens)
    if chat_template is not None:
        fields["chat_template"] = chat_template

    content = json.dumps(fields, ensure_ascii=False).encode()
    BpeTokenizer(content)
    return content


def is_bpe(path: str | os.PathLike[str]) -> bool:
    """Returns whether a vocabulary's file is of this kind, and not a SentencePiece model."""
    with open(path, "rb") as file:
        return file.read(1) == b"{"


def files(path: pathlib.Path) -> dict[str, bytes]:
    """Returns the contents of a folder's tokenizer, by name, given a vocabulary's file."""
    fields = json.loads(path.read_bytes())
    special_tokens = fields.get("special_tokens")
    if special_tokens is None:
        tokenizer = BpeTokenizer(path.read_bytes())
        names = ("pad_token", "bos_token", "eos_token")
        pieces = tokenizer.pieces(range(3))
        special_tokens = {names[i]: pieces[i] for i in range(3) if tokenizer.is_special[i]}

    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special_tokens
    contents = {
        TOKENIZER: json.dumps(fields["tokenizer"], ensure_ascii=False).encode(),
        TOKENIZER_CONFIG: json.dumps(config, ensure_ascii=False).encode(),
    }
    if "chat_template" in fields:
        contents[CHAT_TEMPLATE] = fields["chat_template"].encode()
    return contents


def loaded(path: str | os.PathLike[str]) -> Tokenizer:
    """Returns the tokenizer of a vocabulary's file, of either kind.

    Raises ValueError, which names the file, if it is missing or damaged.
    """
    file = pathlib.Path(path)
    if not file.is_file() or not is_bpe(file):
        return Tokenizer(path)
    try:
        return BpeTokenizer(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_pair(data_dir: str | os.PathLike[str]) -> tuple[Tokenizer, Tokenizer]:
    """Returns a data folder's source and target tokenizers.

    Raises ValueError if the manifest or a vocabulary is missing or damaged.
    """
    files = manifest.load(data_dir).vocabulary_files
    digests.verify(data_dir, files)
    source, target = (loaded(digests.local(data_dir, file)) for file in files)
    return source, target


def their_ids(vocab_size: int, special_ids: Sequence[int]) -> np.ndarray:
    """Returns another model's id of each of our ids, int64 [vocab_size].

    Our ids 0, 1, ... are its `special_ids`. They change places with the ids that are there; all
    other ids are equal.
    """
    theirs: np.ndarray = np.arange(vocab_size)
    for ours, special in enumerate(special_ids):
        place = int(np.flatnonzero(theirs == special)[0])
        theirs[[ours, place]] = theirs[[place, ours]]
    return theirs


class BpeTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, in place of a SentencePiece model."""

    def __init__(self, content: bytes) -> None:
        """Raises ValueError for a damaged file, and without the library."""
        fields = json.loads(content)
        missing = {"tokenizer", "vocab_size", "special_ids"} - fields.keys()
        if missing:
            raise ValueError(f"this vocabulary lacks {', '.join(sorted(missing))}.")
        self._chat_template: str | None = fields.get("chat_template")
        self._special_tokens: dict[str, str] = fields.get("special_tokens") or {}
        self._adds_special_tokens = True
        self.normalization = Normalization.MODEL
        self.vocab_size = int(fields["vocab_size"])
        self.special_ids: tuple[int, ...] = tuple(fields["special_ids"])
        self._theirs = their_ids(self.vocab_size, self.special_ids)
        self._ours = np.argsort(self._theirs)
        try:
            library = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ValueError(
                "this vocabulary needs the tokenizers library: install lingvo_gshard[bpe]."
            ) from error
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(json.dumps(fields["tokenizer"]))
        except Exception as error:  # The library raises no other type.
            raise ValueError(f"tokenizer.json is not a tokenizer: {error}") from error
        # A file may have been saved with them. As in transformers, they belong to a call.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

        # Bytes are written as printable characters, of which each stands for one.
        self._is_byte_level = "ByteLevel" in json.dumps(fields["tokenizer"].get("decoder"))
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= self.vocab_size:
            raise ValueError(
                f"tokenizer.json has the id {largest}, and the table {self.vocab_size} rows."
            )

    @functools.cached_property
    def languages(self) -> dict[str, int]:
        """None: prompts say the languages."""
        return {}

    @property
    def targets(self) -> tuple[str, ...]:
        """None, either."""
        return ()

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a text, with BOS if the tokenizer adds it."""
        ids = self._tokenizer.encode(text, add_special_tokens=self._adds_special_tokens).ids
        return self._ours[ids].tolist()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns a chat as the text that the model continues, for the tokenizer `of_chats`.

        Raises ValueError without a template or the library, and if the template refuses it.
        """
        if self._chat_template is None:
            return super().chat(messages)
        try:
            from lingvo_gshard.input import chat_template
        except ImportError as error:
            raise ValueError(
                "chat templates need the jinja2 library: install lingvo_gshard[bpe]."
            ) from error
        return chat_template.rendered(self._chat_template, messages, self._special_tokens)

    @functools.cached_property
    def of_chats(self) -> Self:
        """The tokenizer of the texts of chats, which contain all of their special tokens."""
        tokenizer = copy.copy(self)
        tokenizer._adds_special_tokens = False
        return tokenizer

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of several texts, without BOS, EOS last."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[*self._ours[encoding.ids].tolist(), EOS_ID] for encoding in encodings]

    @property
    def unk_id(self) -> int:
        """The id of unknown pieces; -1 without one, or if it is EOS."""
        piece = getattr(self._tokenizer.model, "unk_token", None)
        theirs = None if piece is None else self._tokenizer.token_to_id(piece)
        ours = -1 if theirs is None else int(self._ours[theirs])
        return -1 if ours == EOS_ID else ours

    def num_byte_pieces(self, ids: Sequence[int]) -> int:
        """Returns how many of the ids are pieces of a part of a character's bytes."""
        return int(self._is_part[list(ids)].sum())

    @functools.cached_property
    def _is_part(self) -> np.ndarray:
        """Whether each piece has a part of a character's bytes, bool [vocab_size]."""
        texts = self._tokenizer.decode_batch([[token] for token in self._theirs.tolist()])
        return np.array(["\ufffd" in text for text in texts])

    def num_bytes(self) -> np.ndarray:
        """Returns how many bytes of text, in UTF-8, each piece represents, int32 [vocab_size].

        A piece that begins a word counts the space before it, and a special token counts 0.
        """
        num_bytes = np.zeros(self.vocab_size, np.int32)
        added = self._tokenizer.get_added_tokens_decoder()

        for token, piece in enumerate(self.pieces(range(self.vocab_size))):
            if self.is_special[token] or token == EOS_ID:
                continue
            if int(self._theirs[token]) in added:
                num_bytes[token] = len(piece.encode())
            elif self._is_byte_level:
                num_bytes[token] = len(piece)
            elif _BYTE.fullmatch(piece):
                num_bytes[token] = 1
            else:
                num_bytes[token] = len(piece.replace(SPACE, " ").encode())
        return num_bytes

    @functools.cached_property
    def is_special(self) -> np.ndarray:
        """Whether each piece is a special token, bool [vocab_size]; these stand for no text."""
        is_special = np.zeros(self.vocab_size, bool)
        for theirs, token in self._tokenizer.get_added_tokens_decoder().items():
            is_special[self._ours[theirs]] = token.special
        return is_special

    def begins_with_space(self) -> np.ndarray:
        """Returns whether each piece begins a word, bool [vocab_size]."""
        mark = _BYTE_LEVEL_SPACE if self._is_byte_level else SPACE
        return np.array([piece.startswith(mark) for piece in self.pieces(range(self.vocab_size))])

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns the vocabulary's piece for each id; an id without one has an empty piece."""
        return [self._tokenizer.id_to_token(int(self._theirs[i])) or "" for i in map(int, ids)]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text up to the first EOS, without special tokens."""
        theirs = []
        for token in map(int, ids):
            if token == EOS_ID:
                break
            theirs.append(int(self._theirs[token]))
        return str(self._tokenizer.decode(theirs, skip_special_tokens=True))
