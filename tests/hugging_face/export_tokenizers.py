"""Published tokenizers, our exports of them, and the ids that transformers gives with both.

Run the first command where this project is installed, and the second one where transformers and
sentencepiece are installed, in the root of the checkout:

    python -m tests.hugging_face.export_tokenizers /tmp/tokenizers
    python -m tests.hugging_face.load_tokenizers /tmp/tokenizers

The second one prints how many of a thousand lines in twenty scripts have the same ids, and writes
exported_tokenizers.zip beside itself. It has the digests of the files that we write, and the two
vocabularies of a run of ours, with the ids that transformers gives some lines.
"""

import json
import pathlib
import sys

from data_prep import vocabulary
from data_prep.config import BuildConfig
from data_prep.vocabulary import Side
from lingvo_gshard.hugging_face import tokenizer_files
from lingvo_gshard.input import fairseq_vocabulary
from lingvo_gshard.input.normalization import Normalization
from lingvo_gshard.input.tokenizer import Tokenizer
from tests.input import fairseq_vocabulary_test
from tests.input.hugging_face import lines

PUBLISHED = ("nllb_bpe", "nllb_unigram", "m2m_100")
OWN = "two_sides"
SIZE = 1000  # The sizes of its vocabularies.
THEIR_ROWS = (1, 0, 2)
OUR_ROWS = (0, 1, 2)
_TOKENS = ["<2de>", "<2fr>"]  # The targets of a model with several.


def published(folder: pathlib.Path, name: str) -> dict[str, bytes]:
    """Writes a published tokenizer to `theirs`, imports it; returns the files that we export."""
    fairseq_vocabulary_test.write_folder(folder / "theirs", name)
    if name == "m2m_100":
        _with_all_languages(folder / "theirs")
    path = folder / "ours.model"
    path.write_bytes(fairseq_vocabulary.read(folder / "theirs"))
    return tokenizer_files.files((path, path), Tokenizer(path).vocab_size, THEIR_ROWS)


def _with_all_languages(folder: pathlib.Path) -> None:
    """Returns M2M-100's hundred languages, which its tokenizer always has."""
    tokens = [f"__{language}__" for language in tokenizer_files.M2M_LANGUAGES]
    listed = {"additional_special_tokens": tokens}
    (folder / "special_tokens_map.json").write_text(json.dumps(listed))
    names = json.loads((folder / "vocab.json").read_text())
    config = {"model_type": "m2m_100", "vocab_size": len(names) + len(tokens) + 8}
    (folder / "config.json").write_text(json.dumps(config))


def own_lines() -> list[str]:
    """Returns normalized lines for a model of ours, some with their target's token."""
    text = [Normalization.NFKC.of(line) for line in lines.lines()[::7]]
    return [f"{_TOKENS[i % 2]} {line}" if i % 3 == 0 else line for i, line in enumerate(text)]


def _train(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Trains a small vocabulary for each side."""
    config = BuildConfig(source_vocab_size=SIZE, target_vocab_size=SIZE)
    of_scripts = lines.lines()[:400]
    vocabulary.train(Side.SOURCE, of_scripts, config, folder / "source.model", _TOKENS)
    vocabulary.train(Side.TARGET, of_scripts, config, folder / "target.model")
    return folder / "source.model", folder / "target.model"


def write(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    """Creates a folder with these files."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def main(folder: pathlib.Path) -> None:
    """Writes a folder for each tokenizer."""
    folder.mkdir()
    for name in PUBLISHED:
        (folder / name).mkdir()
        write(folder / name / "ours", published(folder / name, name))

    (folder / OWN).mkdir()
    models = _train(folder / OWN)
    write(folder / OWN / "ours", tokenizer_files.files(models, SIZE, OUR_ROWS))
    (folder / OWN / "lines.json").write_text(json.dumps(own_lines()))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
