"""Loads the tokenizers of export_tokenizers.py with transformers: see there.

transformers 4.55.4 and sentencepiece 0.2.1 made the file in this folder.
"""

import hashlib
import json
import pathlib
import sys
import zipfile

from transformers import AutoTokenizer, M2M100Tokenizer, NllbTokenizer, NllbTokenizerFast

from tests.input.hugging_face import lines

_GOLDEN = pathlib.Path(__file__).with_name("exported_tokenizers.zip")
_CLASSES = {
    "nllb_bpe": (NllbTokenizer, NllbTokenizerFast),
    "nllb_unigram": (NllbTokenizer, NllbTokenizerFast),
    "m2m_100": (M2M100Tokenizer,),
}
_LANGUAGES = {"m2m_100": ("sw", "zh")}
_NLLB_LANGUAGES = ("zul_Latn", "deu_Latn")


def main(folder: pathlib.Path) -> None:
    """Compares, and writes the file."""
    digests = {}
    for name, classes in _CLASSES.items():
        ours = folder / name / "ours"
        digests[name] = _digests(ours)
        print(f"{name}: AutoTokenizer is {type(AutoTokenizer.from_pretrained(ours)).__name__}")
        for cls in classes:
            want = _ids(cls.from_pretrained(folder / name / "theirs"), name)
            got = _ids(cls.from_pretrained(ours), name)
            same = sum(a == b for a, b in zip(got, want, strict=True))
            print(f"{name}: {cls.__name__} gives {same} of {len(want)} lines the same ids")

    own = folder / "two_sides"
    digests["two_sides"] = _digests(own / "ours")
    text = json.loads((own / "lines.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(own / "ours")
    sources = [tokenizer(line).input_ids for line in text]
    targets = [tokenizer(text_target=line).input_ids for line in text]
    decoded = tokenizer.batch_decode([[1, *ids] for ids in targets], skip_special_tokens=True)
    golden = {"digests": digests, "sources": sources, "targets": targets, "decoded": decoded}
    with zipfile.ZipFile(_GOLDEN, "w", zipfile.ZIP_LZMA) as file:
        for model in ("source.model", "target.model"):
            file.writestr(model, (own / model).read_bytes())
        file.writestr("golden.json", json.dumps(golden, separators=(",", ":")))
    print(f"two_sides: {type(tokenizer).__name__}; wrote {_GOLDEN.stat().st_size} bytes")


def _digests(folder: pathlib.Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def _ids(tokenizer, name: str) -> list[list[int]]:
    """Returns the ids in two languages of all lines as sources, and of every tenth as a target."""
    ids = []
    source, target = _LANGUAGES.get(name, _NLLB_LANGUAGES)
    tokenizer.src_lang = source
    tokenizer.tgt_lang = target
    for i, line in enumerate(lines.lines()):
        ids.append(tokenizer(line).input_ids)
        if i % 10 == 0:
            ids.append(tokenizer(text_target=line).input_ids)
    return ids


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
