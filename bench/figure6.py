"""Figure 6 on real text: multilingual models against one bilingual baseline a language.

    python -m bench.figure6 --input=m4bible --out=out/figure6 [--jobs=2 --partitions=1]

Prepares the text, trains what is missing, decodes the test sentences and compares. Each step is a
command of the README, which is printed before it runs. Stopped and started again, this command goes
on where it was, also within a training.

SIZES was chosen before any test score was seen: five whole languages, and seven with fewer and
fewer pairs, down to 500. The dev split chooses the size and the checkpoint of a baseline. A
multilingual model decodes with the mean of its last checkpoints. Test is decoded once.
"""

import concurrent.futures
import functools
import json
import pathlib
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from bench import curves
from data_prep import tsv
from lingvo_gshard.core import atomic_file, table
from lingvo_gshard.input import manifest
from lingvo_gshard.train import launch
from lingvo_gshard.train.checkpoints import Best, read_best
from lingvo_gshard.train.summaries import TRAIN_METRICS, read_lines

SIZES: dict[str, int | None] = {
    **dict.fromkeys(("es", "de", "sv", "pl", "zh")),
    **{"pt": 7951, "nb": 4957, "cs": 2994, "nn": 1500, "da": 1000, "uk": 800, "fr": 500},
}
_INPUT = flags.DEFINE_string(
    "input", None, "A folder of {train,dev,test}/<lang>-en.tsv.gz.", required=True
)
_OUT = flags.DEFINE_string("out", None, "The folder for data, runs and results.", required=True)
_STEPS = flags.DEFINE_integer("steps", 2400, "The training steps of a multilingual model.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "The runs of each multilingual model.")
_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "The numbers of experts to try.")
_BASELINES = flags.DEFINE_list("baselines", list(SIZES), "The languages with a baseline.")
_SENTENCES = flags.DEFINE_integer("sentences", 200, "The test sentences of each language.")
_PARTITIONS = flags.DEFINE_integer("partitions", 2, "The devices of a training.")
_JOBS = flags.DEFINE_integer("jobs", 1, "How many trainings run side by side.", lower_bound=1)
_SET = flags.DEFINE_multi_string("set", [], "A setting of all models, path=value; repeatable.")

_STACKS = ("task.encoder", "task.decoder")
_RATES = ("input_dropout", *(f"{stack[5:]}.layer.attention.dropout" for stack in _STACKS))
_DROPOUTS = (*_RATES, *(f"{stack[5:]}.layer.residual_dropout" for stack in _STACKS))
# A baseline's candidates: layers of either stack, M, H, and the rate of dropout.
_BASELINE_SIZES = ((2, 128, 512, 0.3), (1, 64, 256, 0.2))
_AVERAGED = 3  # checkpoints
_SCORES = "decode_test/scores.json"


def main(argv: list[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value)
    for code in _BASELINES.value:
        if code not in SIZES:
            raise app.UsageError(f"--baselines={code}: expected some of {', '.join(SIZES)}")
    write_corpus(pathlib.Path(_INPUT.value), out / "text")
    models = {"dense": ("small.Dense6LLong", list[str]())}
    for count in _EXPERTS.value:
        models[f"MoE({count}E)"] = ("small.MoE8E6LLong", _experts(int(count)))
    _prepared(out, "all")  # For several jobs.
    calls = [
        functools.partial(_multilingual, out, name, seed, *model)
        for seed in range(1, _SEEDS.value + 1)
        for name, model in models.items()
    ]
    calls += [functools.partial(_baseline, out, code) for code in _BASELINES.value]
    logdirs = _in_parallel(calls)
    end = _SEEDS.value * len(models)
    runs = {name: logdirs[i : end : len(models)] for i, name in enumerate(models)}
    _report(out, runs, logdirs[end:])


def _in_parallel(calls: Sequence[Callable[[], pathlib.Path]]) -> list[pathlib.Path]:
    """Returns what the calls return; after an error no further one begins."""
    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as jobs:
        futures = [jobs.submit(call) for call in calls]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        finally:
            jobs.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]


def _report(
    out: pathlib.Path, runs: dict[str, list[pathlib.Path]], baselines: Sequence[pathlib.Path]
) -> None:
    """Writes and prints scores, efforts and sample efficiency; `runs` has a folder per seed."""
    seeds = [(name, seed, d) for name, logdirs in runs.items() for seed, d in enumerate(logdirs, 1)]
    flagged = [f"--run={name}, seed {seed}={logdir}" for name, seed, logdir in reversed(seeds)]
    flagged += [f"--baseline={logdir}" for logdir in baselines]
    print(_command("lingvo_gshard.compare", *flagged, "--paired", f"--out={out / 'figure6'}"))
    logdirs = [*(logdir for *_, logdir in seeds), *baselines]
    efforts = _efforts(logdirs)
    _write_results(out / "figure6.json", logdirs, efforts)
    print(f"\n{table.text(efforts)}")
    if _STEPS.value >= curves.WINDOW_STEPS:
        dense, *mixtures = (_curves(*each) for each in runs.items())
        print(f"\nMillions of tokens to the dense model's loss\n{curves.text(dense, mixtures)}")


def write_corpus(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes folder/LANGUAGE/{train,dev,test} of each language, and all of them as folder/all.

    A language with a size in SIZES gets as many training pairs, drawn with a fixed seed. Does
    nothing if the folder is there.
    """
    if folder.exists():
        return
    aside = folder.with_name(f"{folder.name}.partial")
    for code, size in SIZES.items():
        for split in ("train", "dev", "test"):
            pairs = list(tsv.read(source / split / f"{code}-en.tsv.gz"))
            if split == "train" and size is not None:
                pairs = random.Random(code).sample(pairs, size)
            for group in (code, "all"):
                tsv.write(aside / group / split / f"{code}-en.tsv.gz", pairs)
    aside.rename(folder)


def _experts(count: int) -> list[str]:
    each = [f"{stack}.moe.num_experts={count}" for stack in _STACKS]
    return [*each, f"task.aux_loss_weight={0.01 * count**2}"]


def _multilingual(
    out: pathlib.Path, name: str, seed: int, model: str, settings: Sequence[str]
) -> pathlib.Path:
    logdir = out / "runs" / f"{name}-seed{seed}"
    seeds = [f"train.seed={seed}", f"input.seed={seed}", "input.temperature=2.0"]
    _train(logdir, model, _prepared(out, "all"), _STEPS.value, [*settings, *seeds])
    _decode(logdir, [f"decode.average_checkpoints={_AVERAGED}"])
    return logdir


def _baseline(out: pathlib.Path, code: str) -> pathlib.Path:
    """Trains a language's model in each size; decodes the one that dev prefers."""
    data, losses = _prepared(out, code), dict[pathlib.Path, float]()
    steps = baseline_steps(_pairs(data))
    for layers, dim, hidden_dim, dropout in _BASELINE_SIZES:
        logdir = out / "runs" / f"{code}-{2 * layers}L-M{dim}"
        sizes = [f"{stack}.num_layers={layers}" for stack in _STACKS]
        sizes += [f"{stack}.dense.hidden_dim={hidden_dim}" for stack in _STACKS]
        rates = [f"task.{each}.rate={dropout}" for each in _DROPOUTS]
        settings = [f"task.dim={dim}", *sizes, *rates]
        _train(logdir, "small.Dense6LLong", data, steps, settings)
        losses[logdir] = _best(logdir).value
    chosen = min(losses, key=lambda logdir: losses[logdir])
    _decode(chosen, [f"decode.checkpoint_step={_best(chosen).step}"])
    return chosen


def baseline_steps(pairs: int) -> int:
    """Steps of a baseline: fewer for little text, which a model soon knows by heart."""
    return min(max(100 * round(pairs / 1000), 300), 1200)


def _prepared(out: pathlib.Path, group: str) -> pathlib.Path:
    """Prepares out/text/GROUP; returns the folder."""
    text, folder = out / "text" / group, out / "data" / group
    if not (folder / manifest.FILE_NAME).exists():
        source, target = (12000, 6000) if group == "all" else (2000, 2000)
        vocabularies = (f"--source_vocab_size={source}", f"--target_vocab_size={target}")
        _command("data_prep.build", f"--input={text}", f"--out={folder}", *vocabularies)
    return folder


def _pairs(folder: pathlib.Path) -> int:
    (language,) = manifest.load(folder).languages
    return language.num_examples("train")


def _train(
    logdir: pathlib.Path, model: str, data: pathlib.Path, steps: int, settings: Sequence[str]
) -> None:
    lines = read_lines(logdir / TRAIN_METRICS)
    if lines and lines[-1]["step"] >= steps:
        return
    every = max(steps // 12, 1)
    schedule = [f"train.max_steps={steps}", f"optimizer.schedule.total_steps={steps}"]
    schedule += [f"optimizer.schedule.cool_down_steps={steps // 2}"]
    schedule += [f"train.save_checkpoints_steps={every}"]
    flagged = [f"--set={each}" for each in (*settings, *schedule, *_SET.value)]
    where = [f"--model={model}", f"--data_dir={data}", f"--logdir={logdir}"]
    _trainer("train_and_eval", *where, *flagged)


def _decode(logdir: pathlib.Path, settings: Sequence[str]) -> None:
    if not (logdir / _SCORES).exists():
        settings = [*settings, f"decode.max_sentences={_SENTENCES.value}"]
        _trainer("decode", f"--logdir={logdir}", *(f"--set={each}" for each in settings))


def _best(logdir: pathlib.Path) -> Best:
    best = read_best(logdir / "checkpoints")
    if best is None:
        raise ValueError(f"{logdir}: no best checkpoint; delete the folder, and start again.")
    return best


def _trainer(mode: str, *flagged: str) -> None:
    devices = ("--platform=cpu", f"--num_partitions={_PARTITIONS.value}")
    _command("lingvo_gshard.trainer", f"--mode={mode}", *devices, *flagged)


def _command(module: str, *flagged: str) -> str:
    """Runs a command of the README; returns what it printed. Ends with its status if it failed."""
    print(shlex.join(["python", "-m", module, *flagged]), flush=True)
    done = subprocess.run([sys.executable, "-m", module, *flagged], stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.decode().strip()


def _curves(name: str, logdirs: Sequence[pathlib.Path]) -> curves.Runs:
    params = launch.experiment_params(launch.recorded(str(logdirs[0])))
    return curves.Runs(name, curves.flops_per_token(params), tuple(map(curves.read, logdirs)))


def _efforts(logdirs: Sequence[pathlib.Path]) -> list[list[str]]:
    """The steps, target tokens and minutes of each training."""
    rows = [["run", "steps", "M tokens", "minutes", "dev nll"]]
    for logdir in logdirs:
        lines = read_lines(logdir / TRAIN_METRICS)
        tokens = sum(line["num_steps"] * line["metrics"]["num_tokens"] for line in lines)
        secs = sum(line["secs"] for line in lines)
        counts = (str(lines[-1]["step"]), f"{tokens / 1e6:.2f}", f"{secs / 60:.1f}")
        rows.append([logdir.name, *counts, f"{_best(logdir).value:.3f}"])
    return rows


def _write_results(path: pathlib.Path, logdirs: Sequence[pathlib.Path], efforts: Any) -> None:
    """Writes all scores and efforts, without any text, as JSON."""
    scores = {each.name: json.loads((each / _SCORES).read_bytes()) for each in logdirs}
    atomic_file.write(path, json.dumps({"efforts": efforts, "scores": scores}, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
