"""Writes folders of tokenizers with tokens added by a user, and the ids from transformers.

Run it where transformers and sentencepiece are installed, in the root of the checkout:

    python -m tests.input.hugging_face.added_tokens

It writes added_tokens.zip beside itself: for each tokenizer a JSON object with the files that
save_pretrained writes, and with LINES, their ids as sources in a language, and the text decoded
from the ids. The SentencePiece models are in tokenizers.zip. The present file was made by
transformers 4.57.6 and sentencepiece 0.2.1.
"""

import json
import pathlib
import tempfile
import zipfile
from typing import Any

from transformers import M2M100Tokenizer, NllbTokenizer, PreTrainedTokenizer
from transformers.models.m2m_100 import tokenization_m2m_100

_PATH = pathlib.Path(__file__).with_name("added_tokens.zip")
_TOKENIZERS = pathlib.Path(__file__).with_name("tokenizers.zip")
_MODEL = "sentencepiece.bpe.model"
_FILES = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "vocab.json")
# A word, a part of it, a mark, two words, letters that the models' normalization replaces, and a
# piece that both models already have.
_ADDED = ["Quux", "Qu", "<tag>", "red fox", "\ufb05", "..."]
LINES = (
    "or Quux",
    "orQuuxor",
    "Qu Quu QuuxQu",
    "  or  <tag>or<tag>  or ",
    "red fox or red  fox",
    "or \ufb05or st",
    "......or ....",
    "Quux",
    "or ... or.",
)


def main() -> None:
    """Writes the file."""
    # The library lists all languages; the test has only a few, to keep vocabularies small.
    tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"] = ["de", "en", "fr", "zh", "sw"]
    goldens = {
        "nllb_bpe": _golden("nllb_bpe", NllbTokenizer, ["nds", "xx_new"], "nds"),
        "m2m_100": _golden("m2m_100", M2M100Tokenizer, [], "de"),
    }
    with zipfile.ZipFile(_PATH, "w", zipfile.ZIP_LZMA) as file:
        for name, golden in goldens.items():
            file.writestr(f"{name}.json", json.dumps(golden, separators=(",", ":")))
    print(f"{_PATH}: {_PATH.stat().st_size} bytes")


def _golden(
    name: str, tokenizer_class: Any, languages: list[str], source_language: str
) -> dict[str, Any]:
    with zipfile.ZipFile(_TOKENIZERS) as file:
        published = json.loads(file.read(f"{name}.json"))
        model = file.read(f"{published['model']}.model")

    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        (folder / _MODEL).write_bytes(model)
        for file_name, content in published["files"].items():
            (folder / file_name).write_text(json.dumps(content))
        tokenizer = tokenizer_class.from_pretrained(folder)
        tokenizer.add_tokens(_ADDED)
        if languages:
            tokenizer.add_special_tokens(
                {"additional_special_tokens": languages}, replace_additional_special_tokens=False
            )

        saved = folder / "saved"
        tokenizer.save_pretrained(saved)
        files = {}
        for path in sorted(saved.iterdir()):
            if path.name in _FILES:
                files[path.name] = json.loads(path.read_text(encoding="utf-8"))
        size = published["files"]["config.json"]["vocab_size"] + len(_ADDED) + len(languages)
        files["config.json"] = {"model_type": "m2m_100", "vocab_size": size}
        again = tokenizer_class.from_pretrained(saved, src_lang=source_language)
    return {"model": published["model"], "files": files, "lines": _lines(again, source_language)}


def _lines(tokenizer: PreTrainedTokenizer, language: str) -> list[dict[str, Any]]:
    lines = []
    for line in LINES:
        ids = tokenizer(line).input_ids
        text = tokenizer.decode(ids, skip_special_tokens=True)
        lines.append({"language": language, "line": line, "ids": ids, "text": text})
    return lines


if __name__ == "__main__":
    main()
