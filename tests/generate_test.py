"""A language model's programs: from text to continuations, a bundle of them, and its server."""

import json
import pathlib
import random
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from data_prep.config import BuildConfig
from lingvo_gshard.evaluation import decode_split
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import modes
from lingvo_gshard.runs import run as runs
from tests import exhaustive
from tests.data_prep import prepared

_ROOT = pathlib.Path(__file__).parent.parent
_SMALL = (
    "task.dim=16",
    "task.decoder.num_layers=2",
    "task.decoder.moe.group_size=32",
    "input.batch_size=8",
    "input.row_len=32",
    "eval_input.batch_size=8",
    "eval_input.row_len=32",
    "train.iterations_per_loop=2",
    "train.max_steps=4",
    "decode.batch_size=4",
    "decode.beam_size=2",
    "decode.max_prompt_len=16",
    "decode.prompt_len=6",
    "decode.max_target_len=10",
)
_SYLLABLES = ("ba", "ke", "li", "mo", "nu", "tra", "ste", "kon")
_PROMPTS = ["bake limo", "", "nutra", "bake limo"]
_TEXT = "".join(f"{prompt}\n" for prompt in _PROMPTS)
_SAMPLED = ("--temperature=1.2", "--top_k=40", "--top_p=0.9", "--nbest=2")


def _documents(corpus, split, count):
    rng = random.Random(f"{corpus} {split}")

    def document(number):
        words = ["".join(rng.choices(_SYLLABLES, k=2)) for _ in range(rng.randint(5, 40))]
        return " ".join([*words, str(number)])

    return [document(number) for number in range(count)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for split, sizes in {
        "train": {"news": 120, "web": 40},
        "dev": {"news": 9, "web": 6},
        "test": {"news": 5, "web": 3},
    }.items():
        (folder / "text" / split).mkdir(parents=True)
        for corpus, count in sizes.items():
            lines = _documents(corpus, split, count)
            path = folder / "text" / split / f"{corpus}.txt"
            path.write_text("".join(f"{line}\n" for line in lines))
    config = BuildConfig(kind="text", text_vocab_size=340)
    prepared.build(folder / "text", folder / "data", config)
    return str(folder / "data")


def _run(data_dir, logdir, *overrides, num_partitions=2):
    launch = launches.launch_of("toy.LmMoE8E4L", (*_SMALL, *overrides), data_dir, str(logdir))
    return runs.open_run(launch, str(logdir), num_partitions)


@pytest.fixture(scope="module")
def run_dir(data_dir, tmp_path_factory):
    """A folder in which four steps were trained, with an evaluation."""
    logdir = tmp_path_factory.mktemp("run")
    modes.train_and_eval(_run(data_dir, logdir))
    return logdir


def _binary(name, *flags, text=_TEXT, status=0):
    command = [sys.executable, "-m", f"lingvo_gshard.{name}", *flags]
    done = subprocess.run(command, input=text.encode(), capture_output=True, cwd=_ROOT, timeout=300)
    assert done.returncode == status, done.stderr.decode()
    return (done.stdout if status == 0 else done.stderr).decode()


@pytest.mark.slow
def test_the_first_tokens_of_documents_are_continued(data_dir, run_dir, capsys):
    decode_split.decode_split(_run(data_dir, run_dir), "test")
    folder = run_dir / "decode_test"
    for corpus, count in (("news", 5), ("web", 3)):
        texts = {}
        for kind in ("", ".prompt", ".reference"):
            texts[kind] = (folder / f"{corpus}{kind}.txt").read_text().splitlines()
        together = [
            prompt + rest
            for prompt, rest in zip(texts[".prompt"], texts[".reference"], strict=True)
        ]
        assert together == _documents(corpus, "test", count)
        assert len(texts[""]) == count
    assert f"Wrote the continuations of 8 documents to {folder}." in capsys.readouterr().out
    with pytest.raises(ValueError, match="prompt_len must be 1 to max_prompt_len 16, got 17"):
        decode_split.decode_split(_run(data_dir, run_dir, "decode.prompt_len=17"), "test")


def _asked(address, path, body):
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [("--nbest=2",), _SAMPLED], ids=["beam", "samples"])
def test_a_run_its_bundle_and_a_server_generate_the_same(run_dir, tmp_path, settings):
    folder = tmp_path / "bundle"
    run = (f"--logdir={run_dir}", "--num_partitions=2", *settings)
    is_sampled = settings is _SAMPLED
    told = _binary("export_bundle", *run, f"--bundle={folder}")
    assert f"gshard generate --bundle={folder}" in told

    seed = ("--seed=7",)
    whole = _binary("generate", *run, *seed)
    rows = [line.split("\t") for line in whole.removesuffix("\n").split("\n")]
    assert len(rows) == 4 and all(len(row) == 2 for row in rows)
    assert (rows[0] == rows[3]) == (not is_sampled)

    # The bundle itself, and a file in parts.
    bundle = (f"--bundle={folder}", "--nbest=2", *seed)
    assert _binary("generate", *bundle) == whole
    (tmp_path / "in.txt").write_text(_TEXT)
    _binary("generate", *bundle, f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.txt")
    assert (tmp_path / "out.txt").read_text() == whole
    other = _binary("generate", *bundle[:-1], "--seed=8")
    assert (other != whole) == is_sampled

    # A bundle made again from itself.
    again = tmp_path / "again"
    _binary("export_bundle", f"--from_bundle={folder}", f"--bundle={again}")
    assert _binary("generate", f"--bundle={again}", *bundle[1:]) == whole

    command = [sys.executable, "-m", "lingvo_gshard.serve", "--bundle=.", "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        address = process.stdout.readline().split()[-1]
        body = {"prompts": _PROMPTS, "nbest": 2, "seed": 7}
        answer = _asked(address, "/generate", body)["continuations"]
        assert [[each["text"] for each in nbest] for nbest in answer] == rows

        for path, body, status, message in (
            ("/translate", {"lines": ["a"]}, 404, "POST to /generate, not /translate"),
            ("/generate", {"prompts": ["bake " * 99]}, 413, "prompt 1 has "),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                _asked(address, path, body)
            error = json.load(refused.value)["error"]
            assert refused.value.code == status and message in error and "\n" not in error
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
def test_samples_of_several_devices_are_those_of_one(data_dir, run_dir, num_partitions):
    """With batches of another size, too."""

    def generated(num_partitions, batch_size):
        settings = ("decode.beam_size=1", "decode.temperature=1.2", "decode.top_p=0.9")
        settings += (f"decode.batch_size={batch_size}", "decode.num_best=2")
        run = _run(data_dir, run_dir, *settings, num_partitions=num_partitions)
        found = run.text_decoder().decode(_PROMPTS, seed=3)
        return [[hypothesis.text for hypothesis in nbest] for nbest in found]

    assert generated(num_partitions, 8) == generated(1, 4)


@pytest.mark.slow
def test_mistakes_are_reported_in_one_line(run_dir, tmp_path):
    run = f"--logdir={run_dir}"
    for program, flags, text, message in (
        ("translate", [run], "x", "toy.LmMoE8E4L continues prompts: use gshard generate"),
        ("generate", [run], "ke\n" + "bake " * 99, "generate: prompt 2 has "),
        ("generate", [run, "--source_lang=de"], "x", "the model does not translate"),
        ("generate", [run, "--top_k=3"], "x", "top_k"),
        ("export_bundle", [run, f"--export_saved_model={tmp_path}/m"], "", "does not translate"),
    ):
        told = _binary(program, *flags, text=text, status=1)
        lines = [line for line in told.splitlines() if not line.startswith("1 virtual CPU")]
        assert len(lines) == 1 and message in lines[0], told
