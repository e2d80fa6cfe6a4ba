"""Figure 6 for any runs: scores by language, and the difference to bilingual baselines.

    python -m lingvo_gshard.compare --run=MoE=RUN1 --run=dense=RUN2 --baseline=DE --baseline=FR \
        --out=figure6

Each run is a logdir that `trainer --mode=decode` wrote scores into; a baseline has one language.
Runs with the same name, those of several seeds, count as one model with the mean of their scores.
There is a table for each metric that all of them have; the picture shows BLEU. --paired compares
the first model with each other one by sacreBLEU's paired bootstrap: the 95 % interval of the gain,
and the probability of a gain as large if neither model were better.
"""

import collections
import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.evaluation import quality, significance
from lingvo_gshard.evaluation.comparison import Comparison
from lingvo_gshard.evaluation.quality import Quality
from lingvo_gshard.files import atomic_file, storage

_RUNS = flags.DEFINE_multi_string(
    "run", None, "NAME=LOGDIR; repeatable, also with the same name.", required=True
)
_BASELINES = flags.DEFINE_multi_string(
    "baseline", [], "The logdir of a bilingual model; repeatable."
)
_SPLIT = flags.DEFINE_string("split", "test", "The split that was decoded.")
_PAIRED = flags.DEFINE_bool("paired", False, "Test the first model against each other one.")
_OUT = flags.DEFINE_string("out", None, "Write the table to OUT.txt and a picture to OUT.png.")


def main() -> None:
    names = _distinct("run", map(_named, _RUNS.value))
    logdirs = collections.defaultdict[str, list[str]](list)
    for logdir, name in names.items():
        logdirs[name].append(logdir)
    models = {name: [_quality(logdir) for logdir in runs] for name, runs in logdirs.items()}
    baselines = _distinct("baseline", map(_baseline, _BASELINES.value))
    decoded = [*itertools.chain.from_iterable(models.values()), *baselines.values()]
    comparisons = [
        Comparison(models, {code: each.average(metric) for code, each in baselines.items()}, metric)
        for metric in quality.METRICS
        if all(metric in each.metrics for each in decoded)
    ]
    tables = [comparison.table() for comparison in comparisons]
    if _PAIRED.value:
        folders = {name: list(map(_folder, runs)) for name, runs in logdirs.items()}
        tables += significance.tables(folders, next(iter(models.values()))[0].values("bleu"))
    text = "\n\n".join(tables)
    print(text)
    if _OUT.value:
        atomic_file.write(f"{_OUT.value}.txt", text + "\n")
        comparisons[0].draw(f"{_OUT.value}.png")
        print(f"Wrote {_OUT.value}.txt and {_OUT.value}.png.")


def _named(run: str) -> tuple[str, str]:
    """The logdir and the name of a run."""
    name, separator, logdir = run.partition("=")
    if not (name and separator and logdir):
        raise ValueError(f"--run={run}: expected NAME=LOGDIR.")
    return logdir, name


def _distinct(flag: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict. Raises ValueError if a key comes twice."""
    found = list(pairs)
    keys = [key for key, _ in found]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"--{flag}: {repeated[0]} is given twice.")
    return dict(found)


def _folder(logdir: str) -> pathlib.Path:
    return storage.path(logdir) / f"decode_{_SPLIT.value}"


def _quality(logdir: str) -> Quality:
    return quality.load(_folder(logdir) / "scores.json")


def _baseline(logdir: str) -> tuple[str, Quality]:
    found = _quality(logdir)
    if len(found.languages) != 1:
        codes = ", ".join(row.code for row in found.languages)
        raise ValueError(f"--baseline={logdir}: expected a run of one language, got {codes}.")
    return found.languages[0].code, found


def run() -> None:
    """The console entry."""
    cli.run("compare", main)


if __name__ == "__main__":
    run()
