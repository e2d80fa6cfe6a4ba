"""Figure 6 on real text: multilingual models against one bilingual baseline per language.

    python -m repro.quality.figure6 --input=m4bible --out=out/figure6 [--jobs=2]
    python -m repro.quality.figure6 --input=m4bible --out=out/figure6 --layers=12 --dense_layers=24
    python -m repro.quality.figure6 --input=m4bible --out=out/whole --whole --family=narrow \\
        --experts=32

The second command adds the figure's other axis: every number of experts in every depth, and a deep
dense model, the paper's T(96L). The third takes all 71 languages, with all their training pairs.
`repro.recipes.m4bible` makes the input folder.

The benchmark prepares the text, trains the missing models, decodes the test sentences and compares
the models. Each step is a command of the README, which is printed before it runs. After an
interruption, the benchmark continues where it stopped, even within a training.

SIZES and SPREAD were chosen before any test score was seen. SIZES has five whole languages, and
seven with fewer and fewer pairs, down to 500. The size of a baseline and the checkpoint of every
model are chosen on the dev split. Test is decoded once. repro.quality.sample_efficiency compares
the multilingual runs' losses.
"""

import functools
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.checkpoints.checkpoints import Best, read_best
from lingvo_gshard.input import manifest
from lingvo_gshard.train.metrics_files import TRAIN_METRICS, read_lines
from repro import families
from repro.families import Model
from repro.quality import corpora, multilingual
from xla_spmd.files import atomic_file, table

SIZES: dict[str, int | None] = {
    **dict.fromkeys(("es", "de", "sv", "pl", "zh")),
    **{"pt": 7951, "nb": 4957, "cs": 2994, "nn": 1500, "da": 1000, "uk": 800, "fr": 500},
}
# The languages that have a baseline among whole ones, most pairs first: all sizes, many families.
SPREAD = (
    *("pl", "es", "lzh", "zh", "he", "sv"),
    *("sml", "pon", "fr", "et", "grc", "qu", "uk", "kab", "zu", "chr", "eu", "lv"),
    *("hy", "ru", "ja", "gv", "pot", "gd"),
)
_INPUT = flags.DEFINE_string(
    "input", None, "A folder of {train,dev,test}/<lang>-en.tsv.gz.", required=True
)
_OUT = flags.DEFINE_string("out", None, "The folder for data, runs and results.", required=True)
_SEEDS = flags.DEFINE_integer("seeds", 1, "The runs of each multilingual model.")
_EXPERTS = flags.DEFINE_list("experts", ["8", "32"], "The numbers of experts to try.")
_LAYERS = flags.DEFINE_list("layers", [], "Further even numbers of layers to try, with experts.")
_DENSE_LAYERS = flags.DEFINE_list(
    "dense_layers", [], "Further even numbers of layers to try, without experts."
)
_WHOLE = flags.DEFINE_bool("whole", False, "All languages of --input, with all their pairs.")
_STEPS = flags.DEFINE_integer("steps", None, "The steps of a multilingual model.", lower_bound=12)
_BASELINES = flags.DEFINE_list(
    "baselines",
    None,
    "The languages with a baseline: by default all, or, with --whole, 24 of many sizes.",
)
_SENTENCES = flags.DEFINE_integer("sentences", 200, "The test sentences of each language.")

# The candidates for a baseline: layers of either stack, M, H, and the rate of dropout.
_BASELINE_SIZES = ((2, 128, 512, 0.3), (1, 64, 256, 0.2))
_SMALL_PAIRS = 2000  # The small size was the better one for 500 pairs, and for 800 no longer.
# Short runs learn more from larger steps.
_BASELINE_LEARNING = ("optimizer.schedule.multiplier=1.6", *families.BATCHES)
# The pieces of source and target; other groups have 2000 each. Chinese text has 3,263 characters.
_VOCABULARIES = {"all": (12000, 6000), **dict.fromkeys(("zh", "lzh", "ja"), (6000, 2000))}
_WHOLE_VOCABULARIES = (24000, 6000)
# Evaluations of dev take this many pairs of a whole language, of the 500 to 800 that it has.
_WHOLE_DEV_PAIRS = 200
_SCORES = "decode_test/scores.json"


def main() -> None:
    out = pathlib.Path(_OUT.value)
    source = pathlib.Path(_INPUT.value)
    sizes = corpora.whole_languages(source) if _WHOLE.value else SIZES
    codes = _baseline_languages(sizes)

    models = list(
        multilingual.family().grid(
            multilingual.whole_numbers(_EXPERTS),
            multilingual.layers(_LAYERS),
            multilingual.layers(_DENSE_LAYERS),
        )
    )
    if _STEPS.value:
        models = [families.with_steps(model, _STEPS.value) for model in models]
    corpora.write(source, out / "text", sizes, _WHOLE_DEV_PAIRS if _WHOLE.value else None)
    _prepared(out, "all")  # Once, before several jobs need it.

    # All models with the first seed come first, then with the next, and the baselines last.
    calls = []
    for seed in range(1, _SEEDS.value + 1):
        calls += [functools.partial(_multilingual, out, model, seed) for model in models]
    num_seeded = len(calls)
    calls += [functools.partial(_baseline, out, code) for code in codes]
    logdirs = multilingual.in_parallel(calls)

    seeded = logdirs[:num_seeded]
    baselines = logdirs[num_seeded:]
    runs = {model.name: seeded[i :: len(models)] for i, model in enumerate(models)}
    _report(out, runs, baselines)


def _report(
    out: pathlib.Path, runs: dict[str, list[pathlib.Path]], baselines: Sequence[pathlib.Path]
) -> None:
    """Writes and prints scores and efforts; `runs` has a folder per seed."""
    flagged: list[str] = []
    for name in reversed(runs):
        flagged += [f"--run={name}={logdir}" for logdir in runs[name]]
    flagged += [f"--baseline={logdir}" for logdir in baselines]
    figure = f"--out={out / 'figure6'}"
    print(multilingual.command("lingvo_gshard.compare", *flagged, "--paired", figure))

    logdirs = [*itertools.chain.from_iterable(runs.values()), *baselines]
    efforts = _efforts(logdirs)
    _write_results(out / "figure6.json", logdirs, efforts)
    print(f"\n{table.text(efforts)}")


def _baseline_languages(sizes: Mapping[str, int | None]) -> Sequence[str]:
    """Returns the languages that get a baseline. Raises ValueError for one without text."""
    codes: Sequence[str] | None = _BASELINES.value
    if codes is None:
        codes = SPREAD if _WHOLE.value else list(sizes)
    for code in codes:
        if code not in sizes:
            raise ValueError(f"--baselines={code}: expected some of {', '.join(sizes)}")
    return codes


def _multilingual(out: pathlib.Path, model: Model, seed: int) -> pathlib.Path:
    return _decoded(multilingual.seeded(out / "runs", model, seed, _prepared(out, "all")))


def _baseline(out: pathlib.Path, code: str) -> pathlib.Path:
    """Trains a language's model in each size; decodes test with the best one on dev."""
    data = _prepared(out, code)
    losses = dict[pathlib.Path, float]()
    num_pairs = _pairs(data)
    steps = baseline_steps(num_pairs)
    sizes_to_try = _BASELINE_SIZES if num_pairs < _SMALL_PAIRS else _BASELINE_SIZES[:1]
    for layers, dim, hidden_dim, dropout in sizes_to_try:
        logdir = out / "runs" / f"{code}-{2 * layers}L-M{dim}"
        sizes = families.of_stacks(f"num_layers={layers}", f"dense.hidden_dim={hidden_dim}")
        learning = (*_BASELINE_LEARNING, *families.schedule(steps))
        settings = (f"task.dim={dim}", *sizes, *_dropout(dropout), *learning)
        multilingual.train(logdir, Model(code, "small.Dense6LLong", settings, steps), data)
        losses[logdir] = _best(logdir).value
    return _decoded(min(losses, key=lambda logdir: losses[logdir]))


def _dropout(rate: float) -> tuple[str, ...]:
    """Returns the settings for this rate of dropout in all places."""
    parts = ("layer.attention.dropout", "layer.residual_dropout")
    stacks = families.of_stacks(*(f"{part}.rate={rate}" for part in parts))
    return (f"task.input_dropout.rate={rate}", *stacks)


def baseline_steps(pairs: int) -> int:
    """Returns the steps of a baseline: fewer for little text, which a model soon memorizes."""
    return min(max(200 * round(pairs / 1000), 600), 2400)


def _prepared(out: pathlib.Path, group: str) -> pathlib.Path:
    """Prepares out/text/GROUP; returns the folder."""
    text = out / "text" / group
    folder = out / "data" / group
    if not (folder / manifest.FILE_NAME).exists():
        source, target = _VOCABULARIES.get(group, (2000, 2000))
        if group == "all" and _WHOLE.value:
            source, target = _WHOLE_VOCABULARIES
        vocabularies = (f"--source_vocab_size={source}", f"--target_vocab_size={target}")
        multilingual.command("data_prep.build", f"--input={text}", f"--out={folder}", *vocabularies)
    return folder


def _pairs(folder: pathlib.Path) -> int:
    (language,) = manifest.load(folder).languages
    return language.num_examples("train")


def _decoded(logdir: pathlib.Path) -> pathlib.Path:
    """Decodes test with the best checkpoint on dev; returns the run's folder."""
    if not (logdir / _SCORES).exists():
        settings = (
            f"checkpoint_step={_best(logdir).step}",
            "length_norm_alpha=1.0",
            f"max_sentences={_SENTENCES.value}",
        )
        sets = [f"--set=decode.{setting}" for setting in settings]
        multilingual.trainer("decode", f"--logdir={logdir}", *sets)
    return logdir


def _best(logdir: pathlib.Path) -> Best:
    best = read_best(logdir)
    if best is None:
        raise ValueError(f"{logdir} lacks a best checkpoint; delete the folder, and start again.")
    return best


def _efforts(logdirs: Sequence[pathlib.Path]) -> list[list[str]]:
    """Returns the steps, target tokens and minutes of each training."""
    rows = [["run", "steps", "M tokens", "minutes", "dev nll"]]
    for logdir in logdirs:
        lines = read_lines(logdir / TRAIN_METRICS)
        tokens = sum(line["num_steps"] * line["metrics"]["num_tokens"] for line in lines)
        secs = sum(line["secs"] for line in lines)
        counts = (str(lines[-1]["step"]), f"{tokens / 1e6:.2f}", f"{secs / 60:.1f}")
        rows.append([logdir.name, *counts, f"{_best(logdir).value:.3f}"])
    return rows


def _write_results(path: pathlib.Path, logdirs: Sequence[pathlib.Path], efforts: Any) -> None:
    """Writes all scores and efforts, but not the decoded text, as JSON."""
    scores = {logdir.name: json.loads((logdir / _SCORES).read_bytes()) for logdir in logdirs}
    atomic_file.write(path, json.dumps({"efforts": efforts, "scores": scores}, indent=1) + "\n")


if __name__ == "__main__":
    cli.run("figure6", main)
