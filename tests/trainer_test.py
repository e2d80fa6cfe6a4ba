"""The programs, from text to translations: a run end to end, and mistakes of one line."""

import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from data_prep import pipeline, tsv
from lingvo_gshard import registry
from lingvo_gshard.checkpoints import exported
from lingvo_gshard.checkpoints.saved_steps import whole_steps
from lingvo_gshard.evaluation import decode_split, run_report
from lingvo_gshard.input import manifest, sentences
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.plans import profile
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import modes
from lingvo_gshard.runs import run as runs
from lingvo_gshard.runs.launch import Launch
from lingvo_gshard.train.hooks import NonFiniteLossError
from params import toy
from tests import ports, without
from tests.checkpoints import in_memory
from tests.data_prep import prepared
from tools import fuzz

_SMALL = (
    "task.dim=16",
    "task.encoder.num_layers=2",
    "task.decoder.num_layers=2",
    "task.encoder.moe.group_size=32",
    "task.decoder.moe.group_size=32",
    "input.batch_size=8",
    "input.source_len=32",
    "input.target_len=32",
    "eval_input.batch_size=8",
    "eval_input.source_len=32",
    "eval_input.target_len=32",
    "train.iterations_per_loop=2",
    "train.max_steps=4",
    "decode.batch_size=8",
    "decode.beam_size=2",
    "decode.max_source_len=16",
    "decode.max_target_len=10",
)
_SYLLABLES = ("ba", "ke", "li", "mo", "nu", "tra", "ste", "kon")


def _pairs(language, split, count):
    rng = random.Random(f"{language} {split}")

    def words():
        return " ".join("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(rng.randint(1, 4)))

    return [tsv.Pair(f"{language} {words()} {i}", f"{split} {words()} {i}") for i in range(count)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("corpus"))


def prepare(folder):
    """Prepares a corpus of two languages in a folder, and returns the folder of the data."""
    for split, sizes in {
        "train": {"aa": 160, "br": 40},
        "dev": {"aa": 9},
        "test": {"aa": 5, "br": 3},
    }.items():
        for language, count in sizes.items():
            path = folder / "text" / split / f"{language}-en.tsv.gz"
            tsv.write(path, _pairs(language, split, count))
    config = pipeline.BuildConfig(source_vocab_size=340, target_vocab_size=330)
    prepared.build(folder / "text", folder / "data", config)
    return str(folder / "data")


def _run(data_dir, logdir, *overrides, num_partitions=2):
    launch = launches.launch_of("toy.MoE8E4L", (*_SMALL, *overrides), data_dir, str(logdir))
    return runs.open_run(launch, str(logdir), num_partitions)


@pytest.fixture(scope="module")
def run_dir(data_dir, tmp_path_factory):
    """A folder in which four steps were trained, with an evaluation."""
    logdir = tmp_path_factory.mktemp("run")
    modes.train_and_eval(_run(data_dir, logdir))
    return logdir


def _command(name, *flags):
    return {
        "args": [sys.executable, "-m", f"lingvo_gshard.{name}", *flags],
        "cwd": pathlib.Path(__file__).parent.parent,
    }


def _binary(name, *flags, text=""):
    return subprocess.run(
        **_command(name, *flags), input=text.encode(), capture_output=True, timeout=300
    )


@pytest.mark.slow
def test_training_leaves_metrics_and_a_picture(run_dir):
    lines = (run_dir / "train_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]
    assert (run_dir / "expert_load.png").read_bytes().startswith(b"\x89PNG")
    launch = launches.recorded(str(run_dir))
    assert launch.model == "toy.MoE8E4L" and launch.facts.languages == ("aa", "br")


@pytest.mark.slow
def test_evaluation_prints_its_metrics(data_dir, run_dir, capsys):
    run = _run(data_dir, run_dir)
    modes.evaluate(run)
    printed = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["step"] == "4" and 3 < float(printed["nll"]) < 9
    assert printed["nll of aa:"] == printed["nll"]  # The only language in dev.

    modes.evaluate(run, "test")
    printed = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    by_language = [float(printed[f"nll of {code}:"]) for code in ("aa", "br")]
    assert min(by_language) < float(printed["nll"]) < max(by_language)
    with pytest.raises(ValueError, match="the mean of 2 checkpoints up to step 4 was asked for"):
        modes.evaluate(_run(data_dir, run_dir, "decode.average_checkpoints=2"))


class _LikeLingvo(toy.MoE8E4L):
    """An experiment that gives all its settings by methods."""

    ITERATIONS_PER_LOOP = 2
    MAX_STEPS = 2
    COOL_DOWN_STEPS = 0

    def Task(self):
        p = super().Task().Set(dim=16)
        for stack in (p.encoder, p.decoder):
            stack.num_layers = 2
            stack.moe.group_size = 32
        return p

    def Train(self):
        return super().Train().Set(batch_size=8, source_len=32, target_len=32)

    def Dev(self):
        return super().Dev().Set(split="test", languages=("br",))

    def Test(self):
        return super().Test().Set(languages=("aa",))


@pytest.mark.slow
def test_an_experiment_as_in_lingvo_trains_and_evaluates(data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(registry._experiments, "trainer_test._LikeLingvo", _LikeLingvo)
    launch = launches.launch_of("trainer_test._LikeLingvo", (), data_dir, str(tmp_path))
    run = runs.open_run(launch, str(tmp_path), num_partitions=2)
    modes.train_and_eval(run)
    modes.evaluate(run, "test")
    lines = (tmp_path / "eval_metrics.jsonl").read_text().splitlines()
    nll = {line["name"]: line["nll"] for line in map(json.loads, lines)}
    assert set(nll) == {"dev", "whole_test", "test_aa", "test_br"}
    # Dev is br, and Test is aa, of one split.
    assert nll["whole_test"] == pytest.approx(nll["test_aa"])
    assert nll["dev"] == pytest.approx(nll["test_br"]) and nll["dev"] != nll["whole_test"]


@pytest.mark.slow
def test_the_end_names_the_commands_that_come_next(data_dir, run_dir):
    run = _run(data_dir, run_dir)
    assert modes.next_commands(run, "my run") == (
        "The run is in 'my run'. Next: gshard translate --logdir='my run' < in.txt, or gshard "
        "train --logdir='my run' --mode=decode for the test split"
    )


@pytest.mark.slow
def test_a_profile_is_of_the_steps_that_are_still_to_come(data_dir, run_dir):
    run = _run(data_dir, run_dir, "train.max_steps=8")
    for steps in ((3, 5), (5, 9)):
        with pytest.raises(ValueError, match=f"={steps[0]}:{steps[1]}: .* from step 4 to 8"):
            profile.hooks(run, *steps)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_profile_has_the_parts_of_the_model_and_loads_no_tensorflow(data_dir, run_dir, tmp_path):
    logdir = pathlib.Path(shutil.copytree(run_dir, tmp_path / "run"))
    flags = [f"--logdir={logdir}", f"--data_dir={data_dir}", "--mode=train", "--platform=cpu"]
    flags += ["--num_partitions=2", "--profile_steps=5:6", "--set=train.max_steps=8"]
    command = without.command(("tensorflow",), "lingvo_gshard.trainer", *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {}
    for line in done.stdout.splitlines():
        name, *cells = re.split("  +", line)
        rows[name] = cells
    assert "Steps 5 to 6, " in done.stdout and "6 to 6 were asked for" in done.stdout
    for part in ("experts", "feed forward", "projection", "attention", "optimizer", "all-to-all"):
        assert float(rows[part][0]) > 0, part
    assert list((logdir / "train/plugins/profile").glob("*/*.xplane.pb"))


@pytest.mark.slow
def test_the_report_and_the_weights_are_files_of_the_run(data_dir, run_dir, capsys):
    run = _run(data_dir, run_dir)
    run_report.report(run)
    page = (run_dir / "report.html").read_text()
    assert "<h1>toy.MoE8E4L in " in page and "<tr><td>encoder_1<td>" in page
    modes.export(run)
    weights = exported.read(run_dir / "weights.safetensors")
    assert weights["theta.encoder.layers[1].feed_forward.wi"].shape[0] == 8
    assert "theta.softmax" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_records_its_launch(run_dir, data_dir):
    anew = "train.max_steps=9"
    facts = TranslationInput.Facts(data_dir)
    kept = tuple(anew if given.startswith("train.max_steps=") else given for given in _SMALL)
    products = launches.recorded(str(run_dir)).overrides[-1]
    assert products.startswith("task.product_dtype=")
    launch = launches.launch_of(None, (anew,), None, str(run_dir))
    assert launch == Launch("toy.MoE8E4L", (*kept, products), data_dir, facts)
    named = launches.launch_of("toy.Dense4L", (), data_dir, str(run_dir))
    named, _ = launches.with_product_dtype(named, str(run_dir))
    assert named == Launch("toy.Dense4L", (products,), data_dir, facts)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_layer_with_non_finite_weights_is_named(data_dir, run_dir, tmp_path):
    """By the call in which the step is, the first after a warm start. Its sums overflow."""
    _run(data_dir, run_dir).estimator.export_weights(tmp_path / "weights.safetensors")
    weights = exported.read(tmp_path / "weights.safetensors")
    wo = weights["theta.decoder.layers[1].feed_forward.wo"]
    huge = in_memory.array(np.full(wo.shape, 3e38, np.float32), wo.spec.dims, wo.name)
    exported.write(tmp_path / "huge.safetensors", {**weights, wo.name: huge}, 4)
    run = _run(data_dir, tmp_path / "run", f"train.warm_start_from={tmp_path}/huge.safetensors")
    with pytest.raises(
        NonFiniteLossError,
        match=r"loss of step 1 is nan, first in decoder_1 \(activation_norms\); nothing was saved",
    ):
        modes.train(run)
    assert whole_steps(run.logdir) == []


@pytest.mark.slow
def test_decoding_writes_a_translation_a_line(data_dir, run_dir, capsys):
    decode_split.decode_split(_run(data_dir, run_dir), "test")
    folder = run_dir / "decode_test"
    assert {code: (folder / f"{code}.txt").read_text().count("\n") for code in ("aa", "br")} == {
        "aa": 5,
        "br": 3,
    }
    report = json.loads((folder / "scores.json").read_text())
    sizes = [(row["code"], row["train_pairs"], row["sentences"]) for row in report["languages"]]
    assert sizes[0][0] == "aa" and sizes[0][1] > sizes[1][1] and [s[2] for s in sizes] == [5, 3]
    printed = capsys.readouterr().out
    assert (folder / "bleu.png").exists() and "average" in printed and "chrF++" in printed
    assert "spBLEU is left out: its tokenizer's model is not at " in printed
    (language,) = (each for each in manifest.load(data_dir).languages if each.code == "br")
    pairs = list(sentences.eval_text(pathlib.Path(data_dir, language.text["test"].path)))
    for column, kind in enumerate(("source", "reference")):
        lines = (folder / f"br.{kind}.txt").read_text(encoding="utf-8").splitlines()
        assert lines == [pair[column] for pair in pairs]


@pytest.mark.slow
def test_two_processes_decode_as_one(data_dir, run_dir, tmp_path):
    """The second process takes part, although there are too few lines for it."""
    copies = [pathlib.Path(shutil.copytree(run_dir, tmp_path / name)) for name in ("one", "two")]
    decode_split.decode_split(_run(data_dir, copies[0]), "dev")
    flags = ["--mode=decode", "--split=dev", "--platform=cpu", f"--logdir={copies[1]}"]
    flags += [f"--coordinator=127.0.0.1:{ports.free()}", "--num_processes=2"]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    commands = [_command("trainer", *flags, f"--process_id={i}") for i in range(2)]
    started = [subprocess.Popen(**command, **pipes) for command in commands]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert ["Wrote" in text for text in printed] == [True, False]
    for name in ("aa.txt", "scores.json"):
        one, two = ((copy / "decode_dev" / name).read_text() for copy in copies)
        assert one == two
    assert not (copies[1] / "decode_dev/parts").exists()


@pytest.fixture(scope="module")
def bundle_dir(run_dir, tmp_path_factory):
    """A bundle of the run that gives two translations of a line."""
    folder = tmp_path_factory.mktemp("bundles") / "b"
    done = _binary("export_bundle", f"--logdir={run_dir}", f"--bundle={folder}", "--nbest=2")
    assert done.returncode == 0 and b"gshard translate --bundle=" in done.stdout
    return folder


@pytest.mark.slow
def test_translate_writes_one_line_for_each(bundle_dir):
    """Blank lines, U+2028 within a line, bytes that are not UTF-8, and a missing last newline."""
    text = "aa bake\n\nba\u2028ke\x85li\r\nzzz"
    done = _binary("translate", f"--bundle={bundle_dir}", "--source_lang=aa", text=text)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().split("\n")
    assert len(lines) == 5 and lines[1] == lines[4] == ""


@pytest.mark.slow
def test_translate_answers_line_by_line_and_ends_quietly_when_its_output_is_closed(bundle_dir):
    command = _command("translate", f"--bundle={bundle_dir}")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(**command, **pipes) as process:
        process.stdin.write(b"aa bake\n\n")
        process.stdin.flush()
        assert process.stdout.readline().endswith(b"\n") and process.stdout.readline() == b"\n"
        process.stdout.close()
        process.stdin.write(b"ba ke\n")
        process.stdin.flush()
        assert process.wait(timeout=300) == 128 + signal.SIGPIPE
        assert b"ipe" not in process.stderr.read()


@pytest.mark.slow
def test_a_run_translates_as_its_bundle_does_and_the_second_start_without_tensorflow(
    run_dir, bundle_dir, tmp_path, monkeypatch
):
    """Two translations a line and their scores; one line is too long for the model."""
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(tmp_path))
    text = "aa bake\n\n" + "ba ke, li mo nu. " * 9 + "\n"
    flags = ("--nbest=2", "--scores")
    first = _binary("translate", f"--logdir={run_dir}", *flags, text=text)
    assert first.returncode == 0, first.stderr.decode()
    fields = [1 + line.count("\t") for line in first.stdout.decode().splitlines()]
    # Two hypotheses of one text count as one, which the first line's may have.
    assert fields[0] in (2, 4) and fields[1:] == [2, 4]
    of_bundle = _binary("translate", f"--bundle={bundle_dir}", *flags, text=text)
    assert of_bundle.stdout == first.stdout

    named = "lingvo_gshard.translate", f"--logdir={run_dir}", *flags
    command = without.command(("tensorflow", "grain"), *named)
    second = subprocess.run(command, input=text.encode(), capture_output=True, timeout=300)
    assert second.stdout == first.stdout, second.stderr.decode()


@pytest.mark.slow
def test_nothing_damaged_is_used(data_dir, run_dir, bundle_dir, tmp_path):
    """A few mutations of every kind of file; `python -m tools.fuzz` makes thousands."""
    given = {"data_dir": data_dir, "logdir": run_dir, "bundle_dir": bundle_dir}
    copies = {n: pathlib.Path(shutil.copytree(f, tmp_path / n)) for n, f in given.items()}
    modes.export(_run(data_dir, copies["logdir"]))
    found = fuzz.kinds(**copies)
    assert len(found) == 17
    for kind in found:
        # Most of a checkpoint's files repeat what its other files hold, and are not read.
        number = 30 if kind.name == "checkpoint, arrays" else 6
        counts = fuzz.outcomes(kind, number, seed=1)
        assert counts.total() == number, kind.name
        assert counts["refused"] > 0 or not kind.is_checked, kind.name
        assert counts.keys() <= set(fuzz.FINE), kind.name


@pytest.mark.slow
def test_another_model_in_the_same_folder_is_refused(data_dir, run_dir):
    run = _run(data_dir, run_dir, "task.dim=32")
    before = (run_dir / "experiment.json").read_text()
    with pytest.raises(ValueError, match="holds another model; choose another .*task.dim: 32"):
        modes.train(run)
    with pytest.raises(ValueError, match="holds another model"):
        run_report.report(run)
    assert (run_dir / "experiment.json").read_text() == before


def test_nothing_is_evaluated_or_decoded_before_training(data_dir, tmp_path):
    run = _run(data_dir, tmp_path / "empty")
    with pytest.raises(ValueError, match="empty: there is no checkpoint; train first"):
        modes.evaluate(run)
    with pytest.raises(ValueError, match="empty: no experiment.json; give the --logdir of a tr"):
        decode_split.decode_split(run, "test")


def _one_line(done, binary):
    """Returns the one line on standard error of a process that ended with a mistake."""
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{binary}: "), lines
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=toy.MoE8E4L", "extra"], "unexpected arguments ['extra']"),
        (
            ["--model=toy.MoE8E4L", "--profile_steps=20:20"],
            "--profile_steps=20:20: expected A:B, two steps, A before B.",
        ),
        pytest.param(
            ["--model=toy.MoE8E4L", "--profile_steps=2:4", "--mode=eval"],
            "--profile_steps needs a mode that trains, not --mode=eval.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--model=toy.MoE8E4L", "--logdir=/dev/null/run"],
            "/dev/null is a file; a folder is expected",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_trainer_reports_a_mistake_in_one_line(data_dir, tmp_path, flags, message):
    done = _binary("trainer", f"--data_dir={data_dir}", f"--logdir={tmp_path}/run", *flags)
    assert message in _one_line(done, "trainer")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_verify_data_hashes_all_files_before_anything_is_written(data_dir, tmp_path, capsys):
    modes.verify_data(_run(data_dir, tmp_path / "run"))
    assert capsys.readouterr().out == f"{data_dir}: all 15 files match the manifest.\n"
    path = pathlib.Path(shutil.copytree(data_dir, tmp_path / "data"), "text/test/br-en.tsv.gz")
    path.write_bytes(bytes(path.stat().st_size))
    where = f"--data_dir={tmp_path}/data", f"--logdir={tmp_path}/run"
    products = "--set=task.product_dtype=bfloat16"
    done = _binary("trainer", "--model=toy.MoE8E4L", "--verify_data", products, *where)
    computing = rb"1 virtual CPU device on \d+ cores?, bfloat16 products, remat NONE\n"
    assert re.fullmatch(computing, done.stdout)
    assert f"trainer: {path} has SHA-256" in _one_line(done, "trainer")
    assert not (tmp_path / "run").exists()


def test_a_refused_start_leaves_nothing_behind(data_dir, tmp_path):
    """Damage of a file of records is found before the run's folder is made."""
    copy = pathlib.Path(shutil.copytree(data_dir, tmp_path / "data"))
    path = copy / "records/train/aa-00000-of-00001.array_record"
    content = bytearray(path.read_bytes())
    content[1000] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} has SHA-256"):
        modes.train(_run(str(copy), tmp_path / "run"))
    for steps in (0, -5):
        with pytest.raises(ValueError, match=f"train.max_steps must be 1 or more, got {steps}"):
            modes.train(_run(data_dir, tmp_path / "run", f"train.max_steps={steps}"))
    with pytest.raises(ValueError, match="language br has no examples in split 'dev'"):
        modes.train_and_eval(_run(data_dir, tmp_path / "run", "eval_input.languages=('br',)"))
    assert not (tmp_path / "run").exists()


def test_a_run_in_s3_cannot_be_followed(data_dir, tmp_path, monkeypatch):
    """Its checkpoints pass through the local copy of the process that trains."""
    monkeypatch.setattr(modes.storage, "origin", lambda _: "s3://bucket/run")
    with pytest.raises(ValueError, match="^s3://bucket/run: --mode=continuous_eval cannot follow"):
        modes.evaluate_continuously(_run(data_dir, tmp_path / "run"))
