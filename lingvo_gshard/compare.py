r"""Figure 6 for any runs: scores by language, and the difference to bilingual baselines.

    gshard compare --run=MoE=RUN1 --run=dense=RUN2 --baseline=DE --baseline=FR \
        --out=figure6

Each run is a logdir that `trainer --mode=decode` wrote scores into; a baseline has one language.
Runs with the same name, those of several seeds, count as one model with the mean of their scores.
There is a table for each metric that all of them have; the picture shows BLEU, or spBLEU if that
alone has the same tokens in all languages. --paired compares the first model with each other one by
sacreBLEU's paired bootstrap: the 95 % interval of the gain, and the probability of a gain as large
if neither model were better.
"""

import collections
import pathlib
from collections.abc import Sequence

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.evaluation import quality, significance
from lingvo_gshard.evaluation.comparison import Comparison, check_same_tokens
from lingvo_gshard.evaluation.quality import Quality
from xla_spmd.files import atomic_file, lock, storage

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
    """Prints the tables and writes --out; raises ValueError for a user's mistake."""
    if _OUT.value:
        storage.check_writable(pathlib.Path(_OUT.value).parent)
    logdirs = _logdirs(_RUNS.value)
    models = {name: list(map(_quality, runs)) for name, runs in logdirs.items()}
    baselines = _baselines(_BASELINES.value)

    comparisons = _comparisons(models, baselines)
    tables = [comparison.table() for comparison in comparisons]

    if _PAIRED.value:
        folders = {name: list(map(_folder, runs)) for name, runs in logdirs.items()}
        first_run = next(iter(models.values()))[0]
        codes = first_run.values("bleu").keys()  # All runs have the same ones.
        tables += significance.tables(folders, codes)

    text = "\n\n".join(tables)
    print(text)

    if not _OUT.value:
        return
    with lock.held(f"{_OUT.value}.txt", "writes this file"):
        atomic_file.write(f"{_OUT.value}.txt", text + "\n")
        decoded = _decoded(models, baselines)
        shown = quality.main_metric(decoded)
        for comparison in comparisons:
            if comparison.metric == shown:
                comparison.draw(f"{_OUT.value}.png")
        print(f"Wrote {_OUT.value}.txt and {_OUT.value}.png.")


def _logdirs(runs: Sequence[str]) -> dict[str, list[str]]:
    """Returns the logdirs of each model's runs, given the values NAME=LOGDIR of --run."""
    logdirs = collections.defaultdict[str, list[str]](list)
    known: set[str] = set()

    for run in runs:
        name, separator, logdir = run.partition("=")
        if not (name and separator and logdir):
            raise ValueError(f"--run={run}: expected NAME=LOGDIR.")

        # A name may repeat, but a run that counted twice would weigh twice in its model's mean.
        if logdir in known:
            raise ValueError(f"--run: {logdir} is given twice.")
        known.add(logdir)
        logdirs[name].append(logdir)

    return logdirs


def _baselines(logdirs: Sequence[str]) -> dict[str, Quality]:
    """Returns the bilingual models' scores by language."""
    baselines: dict[str, Quality] = {}
    for logdir in logdirs:
        baseline = _quality(logdir)
        codes = [language.code for language in baseline.languages]
        if len(codes) != 1:
            raise ValueError(
                f"--baseline={logdir}: expected a run of one language, got {', '.join(codes)}."
            )

        if codes[0] in baselines:
            raise ValueError(f"--baseline: {codes[0]} is given twice.")
        baselines[codes[0]] = baseline
    return baselines


def _comparisons(
    models: dict[str, list[Quality]], baselines: dict[str, Quality]
) -> list[Comparison]:
    """Returns a comparison by each metric that all runs and baselines have."""
    decoded = _decoded(models, baselines)
    first_run = decoded[0]

    comparisons = []
    for metric in quality.METRICS:
        if not all(metric in run.metrics for run in decoded):
            continue
        scores: dict[str, float] = {}
        for code, baseline in baselines.items():
            check_same_tokens(metric, first_run, baseline, f"the baseline of {code}")
            scores[code] = baseline.values(metric)[code]
        comparisons.append(Comparison(models, scores, metric))
    return comparisons


def _decoded(models: dict[str, list[Quality]], baselines: dict[str, Quality]) -> list[Quality]:
    """Returns the scores of all runs, and of the baselines after them."""
    decoded: list[Quality] = []
    for runs in models.values():
        decoded += runs
    return [*decoded, *baselines.values()]


def _folder(logdir: str) -> pathlib.Path:
    """Returns the folder that `trainer --mode=decode` wrote."""
    return storage.path(logdir) / f"decode_{_SPLIT.value}"


def _quality(logdir: str) -> Quality:
    return quality.load(_folder(logdir) / "scores.json")


if __name__ == "__main__":
    cli.run("compare", main)
