"""Whether a model is better than another: sacreBLEU's paired bootstrap, also of the average.

All runs' resamplings draw the same sentences, so scores and p values by language are those of
sacreBLEU's PairedTest, which has neither an average over languages nor the intervals of gains. A
model with several runs has the mean of their scores, in each resampling.
"""

import dataclasses
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from sacrebleu import significance

from lingvo_gshard.evaluation import quality
from lingvo_gshard.files import table


@dataclasses.dataclass(frozen=True)
class _Texts:
    """The lines of a language: the references, and the translations by each run of two models."""

    references: list[str]
    base: list[list[str]]
    other: list[list[str]]


@dataclasses.dataclass(frozen=True)
class _Samples:
    """The scores of two models, float [1 + BOOTSTRAPS]: of the text, then of its resamplings."""

    base: np.ndarray
    other: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Gain:
    """What the other model gains over the base, its 95 % interval, and its p value."""

    base_score: float
    other_score: float
    gain: float
    low: float
    high: float
    p: float


def tables(folders: Mapping[str, Sequence[pathlib.Path]], codes: Collection[str]) -> Iterator[str]:
    """Yields tables that compare the first model with each other one, by each available metric.

    Args:
      folders: The folders of each model's runs, which `--mode=decode` wrote.
      codes: The languages to compare.

    Raises:
      ValueError: for one model only, SACREBLEU_SEED `none`, a missing file, or runs that have
        different references.
    """
    (base_name, base_runs), *others = folders.items()
    if not others:
        raise ValueError(
            f"--paired: {base_name} is the only model; give a --run of another to compare with."
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
    for folder in (*base, *other):
        if _lines(folder / f"{code}.reference.txt") != references:
            raise ValueError(f"--paired: {base[0]} and {folder} have other references of {code}.")

    return _Texts(
        references,
        base=[_lines(folder / f"{code}.txt") for folder in base],
        other=[_lines(folder / f"{code}.txt") for folder in other],
    )


def _lines(path: pathlib.Path) -> list[str]:
    """Returns the lines of a file, which end only at newlines."""
    if not path.is_file():
        raise ValueError(f"--paired needs {path}; write it with --mode=decode.")
    return path.read_bytes().decode().split("\n")[:-1]


def _table(metric: str, base_name: str, other_name: str, texts: Mapping[str, _Texts]) -> str:
    """Returns a table of both models' scores and the gain, by language and on average."""
    scorer = quality.METRICS[metric]()

    def mean_of_runs(runs: list[list[str]], references: list[str]) -> np.ndarray:
        samples = [quality.samples(scorer, lines, references) for lines in runs]
        return np.mean(samples, axis=0)

    samples = {}
    for code, text in texts.items():
        samples[code] = _Samples(
            base=mean_of_runs(text.base, text.references),
            other=mean_of_runs(text.other, text.references),
        )

    # The average's interval is not the mean of the languages' intervals: it is that of the mean of
    # their scores in each resampling.
    samples["average"] = _Samples(
        base=np.mean([language.base for language in samples.values()], axis=0),
        other=np.mean([language.other for language in samples.values()], axis=0),
    )

    rows = [["language", base_name, other_name, "gain", "from", "to", "p"]]
    rows += [[name, *_cells(_gain(sample))] for name, sample in samples.items()]
    return f"{table.text(rows)}\nsacreBLEU paired {metric} {scorer.get_signature()}"


def _gain(samples: _Samples) -> _Gain:
    gain, *resampled = (samples.other - samples.base).tolist()

    # sacreBLEU's p value: the share of resamplings whose absolute gain exceeds the mean absolute
    # gain by more than the gain of the text.
    distances = np.abs(resampled)
    p = significance._compute_p_value(distances - distances.mean(), abs(gain))

    # The interval leaves out 2.5 % of the resamplings at either end.
    ordered = np.sort(resampled)
    tail = len(ordered) // 40

    return _Gain(
        base_score=samples.base[0],
        other_score=samples.other[0],
        gain=gain,
        low=ordered[tail],
        high=ordered[-1 - tail],
        p=p,
    )


def _cells(gain: _Gain) -> list[str]:
    return [
        f"{gain.base_score:.2f}",
        f"{gain.other_score:.2f}",
        f"{gain.gain:+.2f}",
        f"{gain.low:+.2f}",
        f"{gain.high:+.2f}",
        f"{gain.p:.4f}",
    ]
