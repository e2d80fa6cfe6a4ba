"""Tokenizers of the `tokenizers` library give transformers' ids and texts: see write_bpe.py."""

import json
import shutil

import pytest

from lingvo_gshard.decoding import bundle, kinds
from lingvo_gshard.hugging_face import exporting, importing
from lingvo_gshard.input import bpe_tokenizer
from lingvo_gshard.input.example_codec import BOS_ID, EOS_ID
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import open_run
from tests import exhaustive
from tests.hugging_face import decoders

NAMES = ("mixtral", "qwen3_moe")


def _golden(name):
    return json.loads((decoders.MODELS / name / "texts.json").read_text())


def _tokenizer(name):
    return bpe_tokenizer.BpeTokenizer(decoders.source(name).vocabulary.model)


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts(name):
    tokenizer = _tokenizer(name)
    golden = _golden(name)
    columns = (golden[name] for name in ("texts", "ids", "decoded"))
    for text, ids, decoded in zip(*columns, strict=True):
        ours = decoders.ours(name, ids).tolist() if ids else []
        assert tokenizer.prompt(text) == ours
        start = int(name == "mixtral")
        assert tokenizer.encode(text) == [*ours[start:], EOS_ID]
        assert tokenizer.decode([*ours, EOS_ID, 9]) == decoded
    assert tokenizer.prompt("") == ([BOS_ID] if name == "mixtral" else [])


def test_a_file_without_a_tokenizer_is_refused(tmp_path):
    folder = tmp_path / "theirs"
    shutil.copytree(decoders.MODELS / "mixtral", folder)
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["model"]["vocab"]["xyz"] = 61
    for content, message in [
        ("{", "tokenizer.json: "),
        ("{}", "tokenizer.json is not a tokenizer"),
        (json.dumps(whole), "tokenizer.json has the id 61, and the table 61 rows"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            importing.read(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", *exhaustive.only("mixtral")])
def test_an_imported_run_continues_prompts_as_generate_does(tmp_path, name):
    logdir = str(tmp_path / "run")
    importing.import_folder(decoders.MODELS / name, logdir, ["decode.max_target_len=9"])
    run = open_run(launches.recorded(logdir), logdir, 1)
    golden = _golden(name)
    prompts = golden["texts"][: len(golden["wholes"])]
    decoder = kinds.text_decoder(*run.decoder())
    for prompt, (best, *_), whole in zip(
        prompts, decoder.decode(prompts), golden["wholes"], strict=True
    ):
        assert prompt + best.text == whole

    # A bundle has the tokenizer, too.
    run.export_bundle(tmp_path / "bundle")
    of_bundle = kinds.text_decoder(*bundle.load(tmp_path / "bundle"))
    texts = [best.text for best, *_ in of_bundle.decode(prompts)]
    assert [prompt + text for prompt, text in zip(prompts, texts, strict=True)] == golden["wholes"]

    exporting.export_folder(run, tmp_path / "out")
    before = json.loads((decoders.MODELS / name / "tokenizer.json").read_text())
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == before
