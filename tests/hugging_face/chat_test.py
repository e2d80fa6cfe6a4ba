"""Chat templates give transformers' texts and ids, and stay with a run: see write_chats.py."""

import json
import pathlib
import shutil
import subprocess
import sys
import types

import pytest

from lingvo_gshard import input as room
from lingvo_gshard.decoding import bundle, kinds
from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.generator import Generator
from lingvo_gshard.hugging_face import exporting, importing
from lingvo_gshard.input import bpe_tokenizer
from lingvo_gshard.input.bpe_tokenizer import BpeTokenizer
from lingvo_gshard.input.example_codec import EOS_ID
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs.run import open_run
from tests.hugging_face import decoders

_ROOT = pathlib.Path(__file__).parents[2]
_CASES = json.loads((pathlib.Path(__file__).parent / "chats.json").read_text(encoding="utf-8"))
_OF_ONE = [{"role": "user", "content": "der hund"}]


def _folder(case, path, **more):
    """Copies a case's model, with its tokenizer's files and JSON objects."""
    shutil.copytree(decoders.MODELS / case["name"], path)
    for name, content in case["files"].items():
        (path / name).write_bytes(content.encode())
    for name, content in more.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def _tokenizer(**fields):
    """A tokenizer with a template, or without one."""
    text = (decoders.MODELS / "qwen3_moe/tokenizer.json").read_text()
    return BpeTokenizer(bpe_tokenizer.vocabulary(text, 61, (57, 58, 40), **fields))


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["name"])
def test_texts_and_ids_of_chats(tmp_path, case):
    source = importing.read(_folder(case, tmp_path / "theirs"))
    tokenizer = BpeTokenizer(source.vocabulary.model)
    for chat in case["chats"]:
        assert tokenizer.chat(chat["messages"]) == chat["text"]
        ids = decoders.ours(case["name"], chat["ids"]).tolist()
        assert tokenizer.of_chats.prompt(chat["text"]) == ids
    # Prompts beside chats still begin with BOS if the tokenizer adds it.
    assert len(tokenizer.prompt("")) == int(case["name"] == "mixtral")


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["name"])
def test_templates_are_written_as_they_were(tmp_path, case):
    folder = _folder(case, tmp_path / "theirs")
    before = importing.read(folder)
    vocabulary = tmp_path / "text.model"
    vocabulary.write_bytes(before.vocabulary.model)
    written = bpe_tokenizer.files(vocabulary)

    template = case["files"].get("chat_template.jinja")
    if template is None:
        entry, _ = json.loads(case["files"]["tokenizer_config.json"])["chat_template"]
        template = entry["template"]
    assert written["chat_template.jinja"] == template.encode()

    for name, content in written.items():
        (folder / name).write_bytes(content)
    assert importing.read(folder).vocabulary.model == before.vocabulary.model


def test_an_answer_follows_a_prompt_with_eos(tmp_path):
    _, case = _CASES
    source = importing.read(_folder(case, tmp_path / "theirs"))
    tokenizer = BpeTokenizer(source.vocabulary.model)
    spec = DecoderSpec("toy", ("books",), 4, (99,), 1, 1, kind="text")
    decoder = types.SimpleNamespace(spec=spec, share=types.SimpleNamespace(count=1))
    chats = Generator(decoder, tokenizer, tokenizer).of_chats
    prompt = case["chats"][1]["text"]
    ids = tokenizer.encode(" sah den hund")
    (part,) = chats.parts(prompt)
    assert EOS_ID in part.ids
    assert chats.num_tokens([prompt]) == [len(part.ids)]
    assert chats.text_of(prompt, ids) == "sah den hund"


def test_what_is_not_used_is_named(tmp_path):
    lines = []
    for case in _CASES:
        lines.append(importing.read(_folder(case, tmp_path / case["name"])).vocabulary.not_used)
    assert lines == [
        ("tokenizer_config.json: chat_template, tokenizer_class",),
        ("chat templates: rag", "tokenizer_config.json: tokenizer_class"),
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chat_template": 3}, "chat_template is 3; expected a text, or a list of texts by name"),
        ({"chat_template": [{"name": "default"}]}, "chat_template is "),
        ({"eos_token": 3}, "eos_token is 3; expected a token"),
    ],
)
def test_damaged_files_are_refused(tmp_path, config, message):
    _, case = _CASES
    with pytest.raises(ValueError, match=message):
        importing.read(_folder(case, tmp_path / "theirs", tokenizer_config=config))


@pytest.mark.parametrize(
    ("ends", "eos"), [([57, 40], 40), ([40, 57], 40), ([57, 3], 57), (57, 57), (None, 57)]
)
def test_the_tokenizers_eos_ends_a_text_if_the_model_may_end_with_it(tmp_path, ends, eos):
    _, case = _CASES
    config = json.loads((decoders.MODELS / "qwen3_moe/config.json").read_text())
    config |= {"eos_token_id": 57, "pad_token_id": None}
    generated = {"eos_token_id": ends} if ends else {}
    folder = _folder(case, tmp_path / "theirs", config=config, generation_config=generated)
    source = importing.read(folder)
    *_, end = source.launch().facts.imported_ids
    assert end == eos


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "its tokenizer has no chat template."),
        ("{{ raise_exception('only\nsystems') }}", "the chat template fails: only systems"),
        ("{% for %}", "the chat template fails: "),
        ("{{ messages + 1 }}", "the chat template fails: "),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: .* is unsafe"),
        ("{{ messages.append(1) }}", "the chat template fails: .* is unsafe"),
    ],
)
def test_templates_that_fail_are_one_line(template, message):
    with pytest.raises(ValueError, match=message) as error:
        _tokenizer(chat_template=template).chat(_OF_ONE)
    assert "\n" not in str(error.value)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "lingvo_gshard.input.chat_template", raising=False)
    monkeypatch.delattr(room, "chat_template", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"need the jinja2 library: install lingvo_gshard\[bpe\]"):
        _tokenizer(chat_template="x").chat(_OF_ONE)


@pytest.mark.slow
def test_a_run_its_bundle_and_its_export_have_the_template(tmp_path):
    case, _ = _CASES
    folder = _folder(case, tmp_path / "theirs")
    template = folder / "chat_template.jinja"
    template.write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    logdir = str(tmp_path / "run")
    settings = ["decode.max_target_len=9", "decode.max_prompt_len=8"]
    importing.import_folder(folder, logdir, settings)
    run = open_run(launches.recorded(logdir), logdir, 1)
    exporting.export_folder(run, tmp_path / "out")
    assert (tmp_path / "out" / template.name).read_bytes() == template.read_bytes()

    run.export_bundle(tmp_path / "bundle")
    generator = kinds.text_decoder(*bundle.load(tmp_path / "bundle"))
    prompts = ("sah:\nhund", "sah:\ncat")
    texts = [generator.chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    assert texts[0] == "<s>sah:\nhund</s>"
    answers = [best.text for best, *_ in generator.of_chats.decode(texts)]
    assert answers[1] == answers[1].strip() != ""  # The other one ends at once.

    command = [sys.executable, "-m", "lingvo_gshard.generate", f"--bundle={tmp_path}/bundle"]
    command += ["--chat", r"--prompt=sah:\n{line}"]
    done = subprocess.run(
        command, input=b"hund\ncat\n", capture_output=True, cwd=_ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == answers
