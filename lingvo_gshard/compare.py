"""Figure 6 for any runs: BLEU by language, and the difference to bilingual baselines.

    python -m lingvo_gshard.compare --run=MoE=RUN1 --run=dense=RUN2 --baseline=DE --baseline=FR \
        --out=figure6

Each run is a logdir that `trainer --mode=decode` wrote scores into; a baseline has one language.
"""

import pathlib
from collections.abc import Iterable
from typing import Any

from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.evaluation import quality
from lingvo_gshard.evaluation.comparison import Comparison
from lingvo_gshard.evaluation.quality import Quality

_RUNS = flags.DEFINE_multi_string("run", None, "NAME=LOGDIR; repeatable.", required=True)
_BASELINES = flags.DEFINE_multi_string(
    "baseline", [], "The logdir of a bilingual model; repeatable."
)
_SPLIT = flags.DEFINE_string("split", "test", "The split that was decoded.")
_OUT = flags.DEFINE_string("out", None, "Write the table to OUT.txt and a picture to OUT.png.")


def main(argv: list[str]) -> None:
    del argv
    models = _distinct("run", map(_named, _RUNS.value))
    comparison = Comparison(
        {name: _quality(logdir) for name, logdir in models.items()},
        _distinct("baseline", map(_baseline, _BASELINES.value)),
    )
    print(comparison.table())
    if _OUT.value:
        pathlib.Path(f"{_OUT.value}.txt").write_text(comparison.table() + "\n")
        comparison.draw(f"{_OUT.value}.png")
        print(f"Wrote {_OUT.value}.txt and {_OUT.value}.png.")


def _named(run: str) -> tuple[str, str]:
    name, separator, logdir = run.partition("=")
    if not (name and separator and logdir):
        raise ValueError(f"--run={run}: expected NAME=LOGDIR.")
    return name, logdir


def _distinct(flag: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict. Raises ValueError if a key comes twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"--{flag}: {key} is given twice.")
        found[key] = value
    return found


def _quality(logdir: str) -> Quality:
    return quality.load(pathlib.Path(logdir, f"decode_{_SPLIT.value}", "scores.json"))


def _baseline(logdir: str) -> tuple[str, float]:
    languages = _quality(logdir).languages
    if len(languages) != 1:
        codes = ", ".join(row.code for row in languages)
        raise ValueError(f"--baseline={logdir}: expected one language, it decoded {codes}.")
    return languages[0].code, languages[0].bleu.value


def run() -> None:
    """The console entry."""
    cli.run("compare", main)


if __name__ == "__main__":
    run()
