"""Writes folders of tokenizers in Hugging Face's format, and the ids from Hugging Face's code.

Run it where transformers and sentencepiece are installed, in the root of the checkout:

    python -m tests.input.hugging_face.tokenizers

It writes tokenizers.zip beside itself: bpe.model and unigram.model, small SentencePiece models that
stand in for the published ones; and for each tokenizer a JSON object with the files of its folder
and the ids that NllbTokenizer or M2M100Tokenizer gives the lines of lines.py: all as sources and
every tenth as a target, each in a pair of languages. The present file was made by transformers
4.55.4 and sentencepiece 0.2.1.
"""

import io
import json
import pathlib
import tempfile
import zipfile
from typing import Any

import sentencepiece
from transformers import M2M100Tokenizer, NllbTokenizer
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from tests.input.hugging_face import lines

_PATH = pathlib.Path(__file__).with_name("tokenizers.zip")
_MODEL = "sentencepiece.bpe.model"
_NLLB_LANGUAGES = FAIRSEQ_LANGUAGE_CODES
_M2M_LANGUAGES = ("de", "en", "fr", "zh", "sw")
_NUM_TRAINING_LINES = 800  # The other lines have characters that the models do not know.


def main() -> None:
    """Writes the file."""
    models = {"bpe": _trained("bpe", "nmt_nfkc"), "unigram": _trained("unigram", "identity")}
    goldens = {
        "nllb_bpe": _nllb(models["bpe"], "bpe"),
        "nllb_unigram": _nllb(models["unigram"], "unigram"),
        "m2m_100": _m2m(models["bpe"]),
    }
    with zipfile.ZipFile(_PATH, "w", zipfile.ZIP_LZMA) as file:
        for kind, model in models.items():
            file.writestr(f"{kind}.model", model)
        for name, golden in goldens.items():
            file.writestr(f"{name}.json", json.dumps(golden, separators=(",", ":")))
    print(f"{_PATH}: {_PATH.stat().st_size} bytes")


def _trained(kind: str, normalization: str) -> bytes:
    """Returns a SentencePiece model with the special pieces of the published ones."""
    of_scripts = lines.lines()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(of_scripts[:_NUM_TRAINING_LINES] * 2),
        model_writer=model,
        vocab_size=1500,
        model_type=kind,
        character_coverage=0.999,
        normalization_rule_name=normalization,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def _nllb(model: bytes, kind: str) -> dict[str, Any]:
    """Returns NLLB's files beside the model, and ids; languages follow the pieces, <mask> last."""
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    special = ("<s>", "<pad>", "</s>", "<unk>")
    tokens = dict(enumerate(special))
    tokens |= dict(enumerate((*_NLLB_LANGUAGES, "<mask>"), start=size + 1))

    added = {}
    for token_id, token in tokens.items():
        added[str(token_id)] = {
            "content": token,
            "lstrip": token == "<mask>",
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
    files = {
        "config.json": {"model_type": "m2m_100", "vocab_size": size + 1 + len(_NLLB_LANGUAGES) + 3},
        "tokenizer_config.json": {
            "added_tokens_decoder": added,
            "additional_special_tokens": _NLLB_LANGUAGES,
            "tokenizer_class": "NllbTokenizer",
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        _write(pathlib.Path(folder), model, files)
        tokenizer = NllbTokenizer.from_pretrained(folder)
    return _golden(kind, files, tokenizer, list(_NLLB_LANGUAGES))


def _m2m(model: bytes) -> dict[str, Any]:
    """Returns M2M-100's files beside the model, and ids.

    vocab.json has its own order of pieces, lacks some of the model's pieces, and has an extra one.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    listed = [piece for i, piece in enumerate(pieces) if i % 7 != 3]
    names = ["<s>", "<pad>", "</s>", "<unk>", *reversed(listed), "madeupword0000"]
    tokens = [f"__{code}__" for code in _M2M_LANGUAGES]
    files = {
        "config.json": {"model_type": "m2m_100", "vocab_size": len(names) + len(tokens) + 8},
        "vocab.json": {name: i for i, name in enumerate(names)},
        "special_tokens_map.json": {"additional_special_tokens": tokens},
        "tokenizer_config.json": {"tokenizer_class": "M2M100Tokenizer"},
    }

    # The library lists all languages; the test has only a few, to keep vocabularies small.
    from transformers.models.m2m_100 import tokenization_m2m_100

    tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"] = list(_M2M_LANGUAGES)
    with tempfile.TemporaryDirectory() as folder:
        _write(pathlib.Path(folder), model, files)
        tokenizer = M2M100Tokenizer.from_pretrained(folder)
    return _golden("bpe", files, tokenizer, list(_M2M_LANGUAGES))


def _write(folder: pathlib.Path, model: bytes, files: dict[str, Any]) -> None:
    (folder / _MODEL).write_bytes(model)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def _golden(
    kind: str, files: dict[str, Any], tokenizer: Any, languages: list[str]
) -> dict[str, Any]:
    """Returns a tokenizer's golden; line i has languages i and 7 * i + 1, modulo their number."""
    pairs = []
    sources = []
    targets = []
    for i, line in enumerate(lines.lines()):
        source = languages[i % len(languages)]
        target = languages[(7 * i + 1) % len(languages)]
        tokenizer.src_lang = source
        tokenizer.tgt_lang = target
        pairs.append((source, target))
        sources.append(tokenizer(line).input_ids)
        if i % 10 == 0:
            targets.append(tokenizer(text_target=line).input_ids)
    return {"model": kind, "files": files, "pairs": pairs, "sources": sources, "targets": targets}


if __name__ == "__main__":
    main()
