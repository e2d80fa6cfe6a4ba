"""The files of a tokenizer of transformers that gives text the ids of a run's vocabularies.

    the vocabulary                                   tokenizer_class, and its files
    has tokens of languages such as deu_Latn         NllbTokenizer: sentencepiece.bpe.model
    has M2M-100's, such as __de__                    M2M100Tokenizer: that, and vocab.json
    one for each side, as `data_prep.build` learns   MarianTokenizer: source.spm, target.spm,
                                                     vocab.json, target_vocab.json

All have tokenizer_config.json, too. The first two undo what fairseq_vocabulary.py made of their
files, so a vocabulary that was imported gets its own ids back. With the third, text needs the form
that our vocabularies want (docs/data.md); the source's model makes it NFKC by itself.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lingvo_gshard.input.fairseq_vocabulary import MODEL
from lingvo_gshard.input.tokenizer import END, LANGUAGE, Tokenizer

_CONFIG = "tokenizer_config.json"
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # Of fairseq, in the order of their ids.
# M2M100Tokenizer has these languages, whatever its files list.
M2M_LANGUAGES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml "
    "mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th "
    "tl tn tr uk ur uz vi wo xh yi yo zh zu"
).split()

# Protobuf makes the class as the module is imported.
_Proto = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
_Piece = _Proto.SentencePiece


def has_languages(vocabularies: Sequence[pathlib.Path]) -> bool:
    """Returns whether vocabularies have tokens of languages, as fairseq's do."""
    return all(Tokenizer(path).languages for path in vocabularies)


def files(
    vocabularies: tuple[pathlib.Path, pathlib.Path], size: int, rows: tuple[int, int, int]
) -> dict[str, bytes]:
    """Returns the contents of a tokenizer's files by their names.

    `vocabularies` are a run's of source and target, `size` is the number of rows of its tables, and
    `rows` those that padding, BOS and EOS have in transformers. Raises ValueError, in one line, for
    a vocabulary that no tokenizer there has.
    """
    source, target = (path.read_bytes() for path in vocabularies)
    sizes = [Tokenizer(path).vocab_size for path in vocabularies]
    if max(sizes) > size:
        raise ValueError(f"the vocabularies have {max(sizes)} pieces, and the table {size} rows")
    if not has_languages(vocabularies):
        return _of_two_sides(source, target, rows)

    if source != target:
        raise ValueError("both sides have tokens of languages, and not one vocabulary")
    return _of_fairseq(_Proto.FromString(source))


# --- one vocabulary with tokens of languages ---


def _of_fairseq(model: Any) -> dict[str, bytes]:
    """Returns the files of NllbTokenizer or M2M100Tokenizer, given what `read` made of such."""
    end = [piece.piece for piece in model.pieces].index(END)
    table = list(model.pieces[:end])
    first = next(i for i, piece in enumerate(table) if _is_language(piece))
    pieces = table[len(_SPECIAL) : first]
    tokens = [piece.piece for piece in table[first:]]

    # The model's own pieces, of which some have no row, and names that come from no text.
    past = [piece for piece in model.pieces[end:] if piece.type != _Piece.CONTROL]
    nameless = [piece.piece for piece in pieces if piece.type == _Piece.CONTROL]
    match = LANGUAGE.fullmatch(tokens[0])
    assert match is not None
    if match["short"]:
        return _of_m2m(model, pieces, past, tokens)
    if past or nameless:
        raise ValueError("NllbTokenizer has no vocabulary that lacks pieces of its model")

    by_id = dict(enumerate(_SPECIAL)) | dict(enumerate(tokens, start=first))
    config = {
        "tokenizer_class": "NllbTokenizer",
        "additional_special_tokens": [token for token in tokens if LANGUAGE.fullmatch(token)],
        "added_tokens_decoder": {str(i): _added(token) for i, token in by_id.items()},
    }
    return {MODEL: _published(model, pieces), _CONFIG: _json(config)}


def _of_m2m(model: Any, pieces: list[Any], past: list[Any], tokens: list[str]) -> dict[str, bytes]:
    """Returns the files of M2M100Tokenizer; its ids are those of vocab.json, and of its code."""
    expected = [f"__{language}__" for language in M2M_LANGUAGES]
    listed = [token for token in tokens if LANGUAGE.fullmatch(token)]
    if listed != expected or tokens[: len(expected)] != expected:
        others = sorted(set(listed) ^ set(expected))
        raise ValueError(
            f"M2M100Tokenizer has {len(expected)} languages of its own: others, such as "
            f"{', '.join(others[:3])}, have no token there"
        )

    names = [*_SPECIAL, *(piece.piece for piece in pieces)]
    config = {
        "tokenizer_class": "M2M100Tokenizer",
        "additional_special_tokens": expected,
        "num_madeup_words": len(tokens) - len(expected),
    }
    with_text = [piece for piece in pieces if piece.type != _Piece.CONTROL]
    return {
        MODEL: _published(model, [*with_text, *past]),
        "vocab.json": _json({name: i for i, name in enumerate(names)}),
        _CONFIG: _json(config),
    }


def _is_language(piece: Any) -> bool:
    return piece.type == _Piece.CONTROL and LANGUAGE.fullmatch(piece.piece) is not None


def _published(model: Any, pieces: Sequence[Any]) -> bytes:
    """Returns a model with the special pieces that NLLB's and M2M-100's have, and these."""
    published = _Proto()
    published.CopyFrom(model)
    del published.pieces[:]
    published.pieces.add(piece="<unk>", type=_Piece.UNKNOWN)
    published.pieces.add(piece="<s>", type=_Piece.CONTROL)
    published.pieces.add(piece="</s>", type=_Piece.CONTROL)
    published.pieces.extend(pieces)

    spec = published.trainer_spec
    spec.unk_id = 0
    spec.bos_id = 1
    spec.eos_id = 2
    spec.pad_id = -1
    spec.vocab_size = len(published.pieces)
    return bytes(published.SerializeToString(deterministic=True))


def _added(token: str) -> dict[str, Any]:
    """Returns a token as `added_tokens_decoder` has it."""
    return {
        "content": token,
        "lstrip": token == "<mask>",
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }


# --- a vocabulary for each side ---


def _of_two_sides(source: bytes, target: bytes, rows: tuple[int, int, int]) -> dict[str, bytes]:
    """Returns the files of MarianTokenizer, whose ids are those of a list of pieces."""
    config = {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": True,
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "additional_special_tokens": ["<s>"],  # With which a translation begins.
        "clean_up_tokenization_spaces": False,
    }
    return {
        "source.spm": source,
        "target.spm": target,
        "vocab.json": _json(_ids(source, rows)),
        "target_vocab.json": _json(_ids(target, rows)),
        _CONFIG: _json(config),
    }


def _ids(model: bytes, rows: tuple[int, int, int]) -> dict[str, int]:
    """Returns the ids of a model's pieces, which are its own but for those with other `rows`."""
    names = [piece.piece for piece in _Proto.FromString(model).pieces]
    special = {PAD_ID: "<pad>", BOS_ID: "<s>", EOS_ID: "</s>", UNK_ID: "<unk>"}
    for token_id, name in special.items():
        if names[token_id] != name:
            raise ValueError(f"piece {token_id} of a vocabulary is {names[token_id]}, not {name}")
    ids = {name: i for i, name in enumerate(names)}
    for ours, theirs in enumerate(rows):
        ids[special[ours]] = theirs
    return ids


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()
