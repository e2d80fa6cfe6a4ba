"""Vocabularies of NLLB-200, NLLB-MoE and M2M-100, from folders in Hugging Face's format.

Their tables have a row for each of fairseq's ids. These differ from the SentencePiece model's ids,
and include tokens of languages, which the model lacks:

    id               NLLB                            M2M-100
    0 1 2 3          <s> <pad> </s> <unk>            the same
    4 ...            the model's pieces from 3 on    the pieces of vocab.json, by its ids
    then             language codes, <mask>          __code__ of each language
    then             a user's tokens                 the same
    to vocab_size    unused rows                     unused rows

`read` makes a single SentencePiece model of all this. Its ids are the ones above, except that 0 and
1 are swapped, since this project pads with 0. So a Tokenizer can use it, text gets fairseq's ids,
and the rows of an imported table are permuted by `rows`.

Ids that text never produces are control pieces: languages, <mask>, unused rows, and a user's
tokens, which the Tokenizer cuts out of the text. After the end of the table come records, such as
the one that text is not normalized before the model (see tokenizer.py), and pieces that only the
model has, which become <unk>.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from lingvo_gshard.files import git_lfs, json_fields
from lingvo_gshard.files.json_fields import Fields
from lingvo_gshard.input import fairseq_tokens
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lingvo_gshard.input.fairseq_tokens import M2M_PIECES, SPECIAL, Tokens
from lingvo_gshard.input.normalization import Normalization
from lingvo_gshard.input.tokenizer import END, LANGUAGE, record

MODEL = "sentencepiece.bpe.model"
# The files of a tokenizer; only the model is required.
FILES = (MODEL, M2M_PIECES, *fairseq_tokens.FILES)
_CONFIG = "config.json"

_OURS = ("<pad>", "<s>", "</s>", "<unk>")
_MODEL_SPECIAL = ("<unk>", "<s>", "</s>")  # The special pieces of the SentencePiece models.
_MAX_UNUSED = 2**18  # The most unused rows of a table. Each becomes a piece of the vocabulary.
# Protobuf creates the class when the module is imported.
_Proto = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
_Piece = _Proto.SentencePiece


def rows(size: int) -> np.ndarray:
    """Returns the row of their table for each of our ids: int64 [size]."""
    theirs = np.arange(size)
    theirs[[PAD_ID, BOS_ID]] = [BOS_ID, PAD_ID]
    return theirs


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The vocabulary in a folder."""

    model: bytes  # A SentencePiece model for our Tokenizer, or a BpeTokenizer's file.
    not_used: tuple[str, ...]  # The unused contents of the tokenizer's files, a line for each file.

    @property
    def is_bpe(self) -> bool:
        """Whether it is a BpeTokenizer's."""
        return self.model.startswith(b"{")


def read(folder: str | pathlib.Path, new_languages: Sequence[str] = ()) -> bytes:
    """Returns the vocabulary in a folder as a SentencePiece model for our Tokenizer.

    The table gets another row for each of `new_languages`, which are codes or, for M2M-100,
    __code__. Raises ValueError if a file is missing or damaged, if the vocabulary is not fairseq's
    or its tokenizer gives text other ids, if config.json has another number of rows, or if a new
    language is malformed or exists already.
    """
    return read_all(folder, new_languages).model


def read_all(folder: str | pathlib.Path, new_languages: Sequence[str] = ()) -> Vocabulary:
    """Returns the vocabulary, and the unused contents of the files; see `read` for the errors."""
    path = pathlib.Path(folder)
    model = _model(path / MODEL)
    pieces = {piece.piece: piece for piece in model.pieces[len(_MODEL_SPECIAL) :]}

    # The pieces of text, and the tokens after them.
    if (path / M2M_PIECES).is_file():
        names = _m2m_names(path / M2M_PIECES)
    else:
        names = [*SPECIAL, *pieces]
    tokens = fairseq_tokens.read(path, names)

    names += tokens.names
    unused = _unused(json_fields.read(path / _CONFIG), names)
    names += unused
    not_used = list(tokens.not_used)
    if unused:
        not_used.append(f"rows of the table: {len(unused)} without a token")
    for language in new_languages:
        _check_new(language, names)
        names.append(language)
    return Vocabulary(_rewritten(model, names, pieces, tokens), tuple(not_used))


def added(model: bytes, new_languages: Iterable[str]) -> bytes:
    """Returns a model from `read` with another row for each new language.

    Raises ValueError if the vocabulary lacks tokens of languages, or if a new language is malformed
    or exists already.
    """
    proto = _Proto.FromString(model)
    names = [piece.piece for piece in proto.pieces]
    if END not in names:
        raise ValueError(
            f"new languages {', '.join(new_languages)}: the vocabulary has no tokens of languages"
        )

    # New languages come before the end of the table and the pieces after it.
    end = names.index(END)
    past = list(proto.pieces[end:])
    del proto.pieces[end:]
    for language in new_languages:
        _check_new(language, names)
        names.append(language)
        proto.pieces.add(piece=language, type=_Piece.CONTROL)
    proto.pieces.extend(past)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return bytes(proto.SerializeToString(deterministic=True))


def _check_new(language: str, names: Sequence[str]) -> None:
    if LANGUAGE.fullmatch(language) is None:
        raise ValueError(f"new language {language!r}: expected a token such as nds_Latn or __nds__")
    if language in names:
        raise ValueError(f"new language {language}: the vocabulary has it already")


def _rewritten(model: Any, names: Sequence[str], pieces: dict[str, Any], tokens: Tokens) -> bytes:
    """Returns a model whose first ids are `names`, with 0 and 1 swapped; `pieces` have text."""
    rewritten = _Proto()
    rewritten.CopyFrom(model)
    del rewritten.pieces[:]
    for name in _OURS:
        kind = _Piece.UNKNOWN if name == _OURS[UNK_ID] else _Piece.CONTROL
        rewritten.pieces.add(piece=name, type=kind)

    # For other names, the model produces no piece: the Tokenizer cuts added tokens out.
    for name in names[len(SPECIAL) :]:
        if name in pieces:
            rewritten.pieces.add().CopyFrom(pieces[name])
        else:
            rewritten.pieces.add(piece=name, type=_Piece.CONTROL)

    # After the table: merges pass through pieces without a row, so the model needs them.
    rewritten.pieces.add(piece=END, type=_Piece.CONTROL)
    records = [record("normalization", Normalization.MODEL)]
    for name in tokens.languages:
        if LANGUAGE.fullmatch(name) is None:
            records.append(record("language", name))
    records += [record("added", name) for name in tokens.added]
    for piece in records:
        rewritten.pieces.add(piece=piece, type=_Piece.CONTROL)
    in_table = set(names)
    for name, piece in pieces.items():
        if name not in in_table:
            rewritten.pieces.add().CopyFrom(piece)

    spec = rewritten.trainer_spec
    spec.pad_id = PAD_ID
    spec.bos_id = BOS_ID
    spec.eos_id = EOS_ID
    spec.unk_id = UNK_ID
    spec.vocab_size = len(rewritten.pieces)
    return bytes(rewritten.SerializeToString(deterministic=True))


# --- the folder's files ---


def _model(path: pathlib.Path) -> Any:
    """Returns the ModelProto in a file, after checking that it has fairseq's special pieces."""
    if not path.is_file():
        raise ValueError(f"{path.parent}: no {MODEL}, so there is no vocabulary to read")
    git_lfs.check(path)
    content = path.read_bytes()
    try:
        sentencepiece.SentencePieceProcessor(model_proto=content)
        model = _Proto.FromString(content)
    except (RuntimeError, DecodeError) as error:
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error

    first = tuple(piece.piece for piece in model.pieces[: len(_MODEL_SPECIAL)])
    if first != _MODEL_SPECIAL:
        raise ValueError(
            f"{path} begins with pieces {', '.join(first)}, expected "
            f"{', '.join(_MODEL_SPECIAL)} as NLLB and M2M-100 have them"
        )
    return model


def _m2m_names(path: pathlib.Path) -> list[str]:
    """Returns the pieces of a vocab.json in the order of their ids, which must be 0, 1, 2, ..."""
    ids = json_fields.read(path).values
    is_numbered = all(type(token_id) is int for token_id in ids.values())
    if not is_numbered or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path}: expected pieces with the ids 0, 1, 2, ..., each once")
    names = sorted(ids, key=ids.__getitem__)
    if tuple(names[: len(SPECIAL)]) != SPECIAL:
        raise ValueError(
            f"{path} begins with pieces {', '.join(names[:4])}, expected {', '.join(SPECIAL)}"
        )
    return names


def _unused(config: Fields, named: Sequence[str]) -> list[str]:
    """Returns names for the rows of the model's table that come after the named ones."""
    num_named = len(named)
    num_rows = config.get("vocab_size", num_named)
    if not isinstance(num_rows, int) or isinstance(num_rows, bool):
        raise ValueError(f"{config.path} has vocab_size {num_rows!r}; expected a number")
    num_unused = num_rows - num_named
    if not 0 <= num_unused <= _MAX_UNUSED:
        raise ValueError(
            f"{config.path} has vocab_size {num_rows}, but the tokenizer has {num_named} ids and "
            f"so is of another size; expected at most {_MAX_UNUSED} unused rows"
        )
    taken = set(named)
    numbered = (f"<unused {number}>" for number in itertools.count())
    return list(itertools.islice((name for name in numbered if name not in taken), num_unused))
