"""The files of a tokenizer of transformers that gives text the ids of a run's vocabularies.

    the vocabulary                                   tokenizer_class, and its files
    has tokens of languages such as deu_Latn         NllbTokenizer: sentencepiece.bpe.model
    has M2M-100's, such as __de__                    M2M100Tokenizer: that, and vocab.json
    one for each side, as `gshard prepare` learns   MarianTokenizer: source.spm, target.spm,
                                                     vocab.json, target_vocab.json

All have tokenizer_config.json, too. The first two undo the conversion by fairseq_vocabulary.py, so
an imported vocabulary gets its own ids again. The third needs text in our vocabularies' form
(docs/data.md), except that the source's model applies NFKC.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lingvo_gshard.input.fairseq_vocabulary import MODEL
from lingvo_gshard.input.tokenizer import LANGUAGE, Tokenizer, language_code

_CONFIG = "tokenizer_config.json"
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq's, in the order of their ids.
# M2M100Tokenizer always has these languages, whatever its files list.
M2M_LANGUAGES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
    "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml "
    "mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th "
    "tl tn tr uk ur uz vi wo xh yi yo zh zu"
).split()

# Protobuf creates the class when the module is imported.
_Proto = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
_Piece = _Proto.SentencePiece


def has_languages(vocabularies: Sequence[pathlib.Path]) -> bool:
    """Returns whether vocabularies have tokens of languages, like fairseq's."""
    return all(Tokenizer(path).languages for path in vocabularies)


def files(
    vocabularies: tuple[pathlib.Path, pathlib.Path], size: int, rows: tuple[int, int, int]
) -> dict[str, bytes]:
    """Returns the contents of a tokenizer's files by their names.

    `vocabularies` are a run's source and target vocabularies, `size` is the number of rows of its
    tables, and `rows` are the rows of padding, BOS and EOS in transformers. Raises ValueError, in
    one line, for a vocabulary that transformers' tokenizers cannot have.
    """
    source, target = (path.read_bytes() for path in vocabularies)
    sizes = [Tokenizer(path).vocab_size for path in vocabularies]
    if max(sizes) > size:
        raise ValueError(f"the vocabularies have {max(sizes)} pieces, and the table {size} rows")
    if not has_languages(vocabularies):
        return _of_two_sides(source, target, rows)

    if source != target:
        raise ValueError("both sides have tokens of languages, and not one vocabulary")
    return _of_fairseq(_Proto.FromString(source), Tokenizer(vocabularies[0]))


# --- one vocabulary with tokens of languages ---


def _of_fairseq(model: Any, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the files of NllbTokenizer or M2M100Tokenizer, given our model and tokenizer."""
    table = list(model.pieces[: tokenizer.vocab_size])
    first = min(tokenizer.languages.values())
    pieces = table[len(_SPECIAL) : first]
    tokens = [piece.piece for piece in table[first:]]

    # Pieces of the model that lack a row in the table, and rows that no text can have.
    past = [piece for piece in model.pieces[len(table) :] if piece.type != _Piece.CONTROL]
    nameless = [piece.piece for piece in pieces if piece.type == _Piece.CONTROL]
    match = LANGUAGE.fullmatch(tokens[0])
    if match is not None and match["short"]:
        return _of_m2m(model, pieces, past, tokens, tokenizer)
    if past or nameless:
        raise ValueError("NllbTokenizer has no vocabulary that lacks pieces of its model")

    by_id = dict(enumerate(_SPECIAL)) | dict(enumerate(tokens, start=first))
    config = {
        "tokenizer_class": "NllbTokenizer",
        "additional_special_tokens": _languages(tokens, tokenizer),
        "added_tokens_decoder": _added_tokens(by_id, tokenizer),
    }
    return {MODEL: _published(model, pieces), _CONFIG: _json(config)}


def _of_m2m(
    model: Any, pieces: list[Any], past: list[Any], tokens: list[str], tokenizer: Tokenizer
) -> dict[str, bytes]:
    """Returns the files of M2M100Tokenizer, whose ids come from vocab.json and from its code."""
    expected = [f"__{language}__" for language in M2M_LANGUAGES]
    listed = _languages(tokens, tokenizer)
    if listed != expected or tokens[: len(expected)] != expected:
        others = sorted(set(listed) ^ set(expected))
        raise ValueError(
            f"M2M100Tokenizer has {len(expected)} languages of its own: others, such as "
            f"{', '.join(others[:3])}, have no token there"
        )

    names = [*_SPECIAL, *(piece.piece for piece in pieces)]
    config: dict[str, Any] = {
        "tokenizer_class": "M2M100Tokenizer",
        "additional_special_tokens": expected,
        "num_madeup_words": len(tokens) - len(expected),
    }
    if tokenizer.added:
        by_id = dict(enumerate(_SPECIAL)) | dict(enumerate(tokens, start=len(names)))
        config["added_tokens_decoder"] = _added_tokens(by_id, tokenizer)
    with_text = [piece for piece in pieces if piece.type != _Piece.CONTROL]
    return {
        MODEL: _published(model, [*with_text, *past]),
        "vocab.json": _json({name: i for i, name in enumerate(names)}),
        _CONFIG: _json(config),
    }


def _languages(tokens: list[str], tokenizer: Tokenizer) -> list[str]:
    """Returns the tokens that are languages."""
    return [token for token in tokens if language_code(token) in tokenizer.languages]


def _published(model: Any, pieces: Sequence[Any]) -> bytes:
    """Returns a model with NLLB's and M2M-100's special pieces, followed by these pieces."""
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


def _added_tokens(by_id: dict[int, str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns `added_tokens_decoder`: special tokens and tokens that a user added, by their ids."""
    # After the first special ones, our ids are equal to theirs.
    by_id = by_id | {token_id: name for name, token_id in tokenizer.added.items()}
    objects = {}
    for token_id, name in sorted(by_id.items()):
        is_special = name not in tokenizer.added
        objects[str(token_id)] = {
            "content": name,
            "lstrip": name == "<mask>",
            "normalized": not is_special,
            "rstrip": False,
            "single_word": False,
            "special": is_special,
        }
    return objects


# --- a vocabulary for each side ---


def _of_two_sides(source: bytes, target: bytes, rows: tuple[int, int, int]) -> dict[str, bytes]:
    """Returns the files of MarianTokenizer, which lists each piece's id."""
    config = {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": True,
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "additional_special_tokens": ["<s>"],  # The first token of a translation.
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
    """Returns the ids of a model's pieces: its own, but `rows` for the special pieces."""
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
