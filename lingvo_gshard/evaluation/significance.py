"""Whether one model is better than another: sacreBLEU's paired bootstrap, also for the average.

All runs' bootstrap samples draw the same sentences, so scores and p values by language equal
sacreBLEU's PairedTest, which computes neither an average over languages nor the intervals of gains.
A model with several runs has, in each sample, the mean of their scores.
"""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from sacrebleu import significance
from sacrebleu.metrics.base import Metric

from lingvo_gshard.evaluation import quality
from lingvo_gshard.input import example_codec
from xla_spmd.files import table

_ROUNDING = 1e-9  # For scores from 0 to 100.


@dataclasses.dataclass(frozen=True)
class _Texts:
    """The lines of a language: the references, and the translations from each run of two models."""

    references: list[str]
    runs_of_models: list[list[list[str]]]  # The base's runs, then the other model's.


@dataclasses.dataclass(frozen=True)
class _Gain:
    """The other model's gain over the base, its 95 % interval, and its p value.

    The interval and the p value are None if all samples have the same gain, as for a single
    sentence. If that gain is 0, p is 1.
    """

    base_score: float
    other_score: float
    gain: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


def tables(folders: Mapping[str, Sequence[pathlib.Path]], codes: Collection[str]) -> Iterator[str]:
    """Yields tables that compare the first model with each other model, by each available metric.

    Args:
      folders: The folders of each model's runs, which `--mode=decode` wrote.
      codes: The languages to compare.

    Raises:
      ValueError: if there is only one model, SACREBLEU_SEED is `none`, a file is missing, a
        language lacks sentences, or runs have different references.
    """
    (base_name, base_runs), *others = folders.items()
    if not others:
        raise ValueError(
            f"--paired: {base_name} is the only model; add a --run of another model to compare."
        )
    if os.environ.get("SACREBLEU_SEED", "").lower() == "none":
        raise ValueError("--paired draws the same sentences for all runs; unset SACREBLEU_SEED.")

    for other_name, other_runs in others:
        texts = {code: _texts(base_runs, other_runs, code) for code in codes}
        for metric in quality.available():
            yield _table(metric, base_name, other_name, texts)


def _texts(base: Sequence[pathlib.Path], other: Sequence[pathlib.Path], code: str) -> _Texts:
    """Reads a language's lines from the folders of two models' runs."""
    # Sentence i of one run must be sentence i of the other: resamplings draw their numbers.
    references = _lines(base[0] / f"{code}.reference.txt")
    if not references:
        raise ValueError(f"--paired: {base[0]} has no sentences of {code}.")
    for folder in (*base, *other):
        if _lines(folder / f"{code}.reference.txt") != references:
            raise ValueError(f"--paired: {base[0]} and {folder} differ in references of {code}.")

    runs_of_models = []
    for folders in (base, other):
        runs_of_models.append([_lines(folder / f"{code}.txt") for folder in folders])
    return _Texts(references, runs_of_models)


def _lines(path: pathlib.Path) -> list[str]:
    """Returns the lines of a file, which end only at newlines."""
    if not path.is_file():
        raise ValueError(f"--paired needs {path}; write it with --mode=decode.")
    return path.read_bytes().decode().split("\n")[:-1]


def _table(metric: str, base_name: str, other_name: str, texts: Mapping[str, _Texts]) -> str:
    """Returns a table of both models' scores and the gain, by language and on average.

    Languages with different tokens are not averaged.
    """
    samples: dict[str, np.ndarray] = {}
    codes_by_signature: dict[str, list[str]] = collections.defaultdict(list)
    for code, text in texts.items():
        _, target = example_codec.sides(code, texts)
        scorer = quality.scorer_for(metric, target)
        samples[code] = _samples(scorer, text)
        codes_by_signature[str(scorer.get_signature())].append(code)

    rows = [["language", base_name, other_name, "gain", "from", "to", "p"]]
    rows += [[code, *_cells(_gain(sample))] for code, sample in samples.items()]

    # The average's interval is not the mean of the languages' intervals, but the interval of the
    # mean over languages in each sample.
    are_alike = len(codes_by_signature) == 1
    if are_alike:
        average = np.mean(list(samples.values()), axis=0)
        rows.append(["average", *_cells(_gain(average))])

    lines = [table.text(rows)]
    for signature in sorted(codes_by_signature):
        codes = "" if are_alike else f": {', '.join(codes_by_signature[signature])}"
        lines.append(f"sacreBLEU paired {metric} {signature}{codes}")
    return "\n".join(lines)


def _samples(scorer: Metric, texts: _Texts) -> np.ndarray:
    """Returns the scores of two models, of the text and of its samples: float [2, 1 + BOOTSTRAPS].

    A model's score is the mean over its runs.
    """
    means = []
    for runs in texts.runs_of_models:
        of_runs = [quality.samples(scorer, lines, texts.references) for lines in runs]
        means.append(np.mean(of_runs, axis=0))
    return np.array(means)


def _gain(samples: np.ndarray) -> _Gain:
    """Returns the gain, given the result of `_samples`."""
    base_score, other_score = samples[:, 0].tolist()
    gain, *resampled = (samples[1] - samples[0]).tolist()

    # A test needs variance; all samples of a single sentence are that sentence.
    if np.ptp([gain, *resampled]) < _ROUNDING:
        if abs(gain) >= _ROUNDING:
            return _Gain(base_score, other_score, gain)
        return _Gain(base_score, other_score, 0.0, low=0.0, high=0.0, p=1.0)

    # sacreBLEU's p value: the share of samples whose absolute gain exceeds the mean absolute gain
    # by more than the gain of the text.
    distances = np.abs(resampled)
    p = significance._compute_p_value(distances - distances.mean(), abs(gain))

    # The interval leaves out 2.5 % of the samples at either end.
    ordered = np.sort(resampled)
    tail = len(ordered) // 40

    return _Gain(
        base_score,
        other_score,
        gain,
        low=ordered[tail],
        high=ordered[-1 - tail],
        p=p,
    )


def _cells(gain: _Gain) -> list[str]:
    return [
        f"{gain.base_score:.2f}",
        f"{gain.other_score:.2f}",
        f"{gain.gain:+.2f}",
        table.number(gain.low, "+.2f"),
        table.number(gain.high, "+.2f"),
        table.number(gain.p, ".4f"),
    ]
