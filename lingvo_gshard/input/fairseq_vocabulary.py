"""Vocabularies of NLLB-200, NLLB-MoE and M2M-100, from a folder as Hugging Face publishes them.

Their tables have a row for each id of fairseq's, which differs from that of their SentencePiece
model, and has tokens of languages, which the model lacks:

    id               NLLB                            M2M-100
    0 1 2 3          <s> <pad> </s> <unk>            the same
    4 ...            the model's pieces from 3 on    those of vocab.json, by its ids
    then             language codes, <mask>          __code__ of each language
    to vocab_size    unused rows                     unused rows

`read` makes one SentencePiece model of it all, whose ids are these but for 0 and 1, which it swaps:
this project pads with 0. So a Tokenizer takes it, text gets their ids, and the rows of a table that
is imported are permuted by `rows`. What no text spells is a control piece: languages, <mask>,
unused rows. Past the end of the table are what the model alone knows, which becomes <unk>, and a
record that text goes to the model as it is; see Tokenizer.
"""

import contextlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from lingvo_gshard.files import json_records
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lingvo_gshard.input.normalization import Normalization
from lingvo_gshard.input.tokenizer import END, LANGUAGE, recorded

MODEL = "sentencepiece.bpe.model"
_M2M = "vocab.json"
_CONFIG = "config.json"
# Where tokens of languages are listed: with their ids, best first, or in their order alone.
_WITH_IDS = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
_IN_ORDER = ("special_tokens_map.json", "tokenizer_config.json")

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # Of fairseq, in the order of their ids.
_OURS = ("<pad>", "<s>", "</s>", "<unk>")
_MODEL_SPECIAL = ("<unk>", "<s>", "</s>")  # Of the SentencePiece models.
_MASK = "<mask>"
_MAX_UNUSED = 64  # Tables are padded to multiples of at most this.

# Protobuf makes the class as the module is imported.
_Proto = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
_Piece = _Proto.SentencePiece


def rows(size: int) -> np.ndarray:
    """Returns, for each of our ids, the row of their table that it has: int64 [size]."""
    theirs = np.arange(size)
    theirs[[PAD_ID, BOS_ID]] = [BOS_ID, PAD_ID]
    return theirs


def read(folder: str | pathlib.Path, new_languages: Sequence[str] = ()) -> bytes:
    """Returns the vocabulary in a folder as a SentencePiece model for our Tokenizer.

    The table gets a row more for each of the `new_languages`, which are codes or, for M2M-100, as
    __code__. Raises ValueError if a file is missing or damaged, if the vocabulary is not fairseq's,
    if config.json has another number of rows, or if a new language is none or is there already.
    """
    path = pathlib.Path(folder)
    model = _model(path / MODEL)
    pieces = {piece.piece: piece for piece in model.pieces[len(_MODEL_SPECIAL) :]}

    # The table of pieces with text, and the ids of the tokens past it.
    if (path / _M2M).is_file():
        names = _m2m_names(path / _M2M)
        tokens = _tokens(path, len(names), masked=False)
    else:
        names = [*_SPECIAL, *pieces]
        tokens = _tokens(path, len(names), masked=True)

    names += tokens
    names += _unused(path / _CONFIG, len(names))
    for language in new_languages:
        _check_new(language, names)
        names.append(language)
    return _rewritten(model, names, pieces)


def added(model: bytes, new_languages: Iterable[str]) -> bytes:
    """Returns a model that `read` returned with a row more for each new language; raises as it."""
    proto = _Proto.FromString(model)
    names = [piece.piece for piece in proto.pieces]
    if END not in names:
        raise ValueError(
            f"new languages {', '.join(new_languages)}: the vocabulary has no tokens of languages"
        )

    # In front of the end of the table, and what follows it.
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


def _rewritten(model: Any, names: Sequence[str], pieces: dict[str, Any]) -> bytes:
    """Returns a model with `names` as its first ids, but for 0 and 1; `pieces` have text."""
    rewritten = _Proto()
    rewritten.CopyFrom(model)
    del rewritten.pieces[:]
    for name in _OURS:
        kind = _Piece.UNKNOWN if name == _OURS[UNK_ID] else _Piece.CONTROL
        rewritten.pieces.add(piece=name, type=kind)

    # A name that the model does not know can come from no text.
    for name in names[len(_SPECIAL) :]:
        if name in pieces:
            rewritten.pieces.add().CopyFrom(pieces[name])
        else:
            rewritten.pieces.add(piece=name, type=_Piece.CONTROL)

    # Past the table: merges lead over pieces that have no row, so the model needs them.
    rewritten.pieces.add(piece=END, type=_Piece.CONTROL)
    rewritten.pieces.add(piece=recorded(Normalization.MODEL), type=_Piece.CONTROL)
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
    """Returns the ModelProto in a file, checked to have fairseq's special pieces."""
    if not path.is_file():
        raise ValueError(f"{path.parent}: no {MODEL}, so there is no vocabulary to read")
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
    """Returns the pieces of a vocab.json in the order of their ids, checked to be 0, 1, 2, ..."""
    ids = _json(path)
    is_numbered = isinstance(ids, dict) and all(isinstance(x, int) for x in ids.values())
    if not is_numbered or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path}: expected pieces with the ids 0, 1, 2, ..., each once")
    names = sorted(ids, key=ids.__getitem__)
    if tuple(names[: len(_SPECIAL)]) != _SPECIAL:
        raise ValueError(
            f"{path} begins with pieces {', '.join(names[:4])}, expected {', '.join(_SPECIAL)}"
        )
    return names


def _tokens(folder: pathlib.Path, first: int, *, masked: bool) -> list[str]:
    """Returns the tokens from id `first` on: those of languages, and <mask> if `masked`."""
    by_id = _tokens_by_id(folder)
    beyond = {token_id: name for token_id, name in by_id.items() if token_id >= first}
    if any(LANGUAGE.fullmatch(name) for name in beyond.values()):
        expected = list(range(first, first + len(beyond)))
        if sorted(beyond) != expected:
            raise ValueError(
                f"{folder}: tokens of languages have ids {min(beyond)} to {max(beyond)}, but the "
                f"pieces end at {first - 1}: the tokenizer is of another size"
            )
        return [beyond[token_id] for token_id in expected]

    # Without ids, the order is fairseq's: <mask> comes last.
    for name in _IN_ORDER:
        fields = _object(folder / name)
        with _as_written(folder / name):
            listed = fields.get("additional_special_tokens") or []
            languages = [token for token in map(_content, listed) if LANGUAGE.fullmatch(token)]
        if languages:
            return [*languages, _MASK] if masked else languages
    raise ValueError(
        f"{folder}: no file lists the tokens of languages; expected one of "
        f"{', '.join(dict.fromkeys((*_WITH_IDS, *_IN_ORDER)))}"
    )


def _tokens_by_id(folder: pathlib.Path) -> dict[int, str]:
    """Returns the tokens that the first file with ids of them lists; none without such a file."""
    for name in _WITH_IDS:
        fields = _object(folder / name)
        with _as_written(folder / name):
            by_id = _ids(name, fields)

        # A file may list the special tokens alone.
        if any(LANGUAGE.fullmatch(token) for token in by_id.values()):
            return by_id
    return {}


def _ids(name: str, fields: dict[str, Any]) -> dict[int, str]:
    """Returns the tokens by id that the fields of a file of that name list."""
    by_id: dict[int, str] = {}
    if name == "tokenizer.json":
        for token in fields.get("added_tokens", ()):
            by_id[int(token["id"])] = str(token["content"])
    elif name == "tokenizer_config.json":
        for token_id, token in fields.get("added_tokens_decoder", {}).items():
            by_id[int(token_id)] = _content(token)
    else:
        for content, token_id in fields.items():
            by_id[int(token_id)] = content
    return by_id


@contextlib.contextmanager
def _as_written(path: pathlib.Path) -> Iterator[None]:
    """Raises ValueError for a file whose values are of other types than transformers writes."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not as transformers writes it ({error!r})") from error


def _content(token: Any) -> str:
    """Returns the text of a token, which files give as it is or in an object."""
    return str(token["content"] if isinstance(token, dict) else token)


def _unused(config: pathlib.Path, num_named: int) -> list[str]:
    """Returns names for the rows that the model's table has past its `num_named` ids."""
    num_rows = _object(config).get("vocab_size", num_named)
    if not isinstance(num_rows, int):
        raise ValueError(f"{config} has vocab_size {num_rows!r}; expected a number")
    num_unused = num_rows - num_named
    if not 0 <= num_unused < _MAX_UNUSED:
        raise ValueError(
            f"{config} has vocab_size {num_rows}, but the tokenizer has {num_named} ids: it is of "
            f"another size; expected at most {_MAX_UNUSED - 1} unused rows"
        )
    return [f"<unused {number}>" for number in range(num_unused)]


def _object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file, an empty one if there is no file."""
    if not path.is_file():
        return {}
    value = _json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def _json(path: pathlib.Path) -> Any:
    try:
        return json_records.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
