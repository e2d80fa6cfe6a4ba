"""The programs with all folders in a bucket: build, train, stop, resume, decode, translate."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import fsspec
import pytest

from data_prep import tsv
from tests import buckets, exhaustive

pytestmark = pytest.mark.slow

_ROOT = pathlib.Path(__file__).parent.parent
_SMALL = {
    "task.dim": 16,
    "task.encoder.num_layers": 2,
    "task.decoder.num_layers": 2,
    "task.encoder.moe.group_size": 32,
    "task.decoder.moe.group_size": 32,
    "input.batch_size": 8,
    "input.source_len": 32,
    "input.target_len": 32,
    "eval_input.batch_size": 8,
    "eval_input.source_len": 32,
    "eval_input.target_len": 32,
    "train.iterations_per_loop": 2,
    "train.save_checkpoints_steps": 2,
    "train.keep_checkpoint_max": 2,
    "decode.batch_size": 8,
    "decode.beam_size": 2,
    "decode.max_source_len": 16,
    "decode.max_target_len": 10,
}


@pytest.fixture(autouse=True)
def environment(tmp_path_factory, monkeypatch):
    """Each command would compile: the programs are cached."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(cache))


def _command(module, *flags):
    return [sys.executable, "-m", module, *flags]


def _run(module, *flags, text=""):
    done = subprocess.run(
        _command(module, *flags), input=text, capture_output=True, text=True, cwd=_ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _corpus(folder):
    words = ["red", "green", "blue", "one", "two", "three", "big", "small"]
    for split, count in {"train": 120, "dev": 9, "test": 5}.items():
        lines = [f"{words[i % 8]} {words[i // 8 % 8]} {split} {i}" for i in range(count)]
        pairs = [tsv.Pair(line[::-1], line) for line in lines]
        tsv.write(folder / split / "aa-en.tsv.gz", pairs)
    return folder


@pytest.mark.parametrize("server", [buckets.gcs, *exhaustive.only(buckets.s3)])
def test_prepare_train_and_translate_in_a_bucket(server, tmp_path):
    corpus = _corpus(tmp_path / "text")
    sizes = ["--source_vocab_size=330", "--target_vocab_size=330", "--workers=1"]
    devices = ["--platform=cpu", "--num_partitions=2"]
    settings = [f"--set={path}={value}" for path, value in _SMALL.items()]
    with server() as url:
        data, run, bundle = f"{url}/data", f"--logdir={url}/run", f"{url}/bundle"
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)

        _run("data_prep.build", f"--input={corpus}", f"--out={data}", *sizes)
        made = json.loads(files.cat_file(f"{root}/data/manifest.json"))
        assert [each["code"] for each in made["languages"]] == ["aa"]

        model = ["--model=toy.MoE8E4L", f"--data_dir={data}", *settings]
        train = [run, *devices, "--mode=train_and_eval"]
        endless = _command("lingvo_gshard.trainer", *model, *train)
        with subprocess.Popen(endless, cwd=_ROOT, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not files.glob(f"{root}/run/checkpoints/*/commit*"):
                time.sleep(1)
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 75
        steps = _steps(files, root)
        assert 1 <= len(steps) <= 3  # The newest two, and the best.

        goal = steps[-1] + 4
        _run("lingvo_gshard.trainer", *train, f"--set=train.max_steps={goal}")
        assert _steps(files, root)[-2:] == [goal - 2, goal]
        lines = files.cat_file(f"{root}/run/train_metrics.jsonl").decode().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(2, goal + 1, 2))
        for written in ("train/events*", "eval_dev/events*", "expert_load.png"):
            assert files.glob(f"{root}/run/{written}")

        assert "BLEU" in _run("lingvo_gshard.trainer", run, *devices, "--mode=decode")
        assert len(files.cat_file(f"{root}/run/decode_test/aa.txt").splitlines()) == 5
        assert f"Wrote {url}/run/weights" in _run(
            "lingvo_gshard.trainer", run, *devices, "--mode=export"
        )
        translate = "lingvo_gshard.translate"
        wanted = _run(translate, run, *devices, text="der eno\nowt\n")
        _run("lingvo_gshard.export_bundle", run, *devices, f"--bundle={bundle}")
        assert _run(translate, f"--bundle={bundle}", text="der eno\nowt\n") == wanted


def _steps(files, root):
    whole = files.glob(f"{root}/run/checkpoints/*/commit_success.txt")
    return sorted(int(path.split("/")[-2]) for path in whole)
