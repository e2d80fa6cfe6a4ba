"""Whether a model is better than another: sacreBLEU's paired bootstrap, also of the average.

All runs' resamplings draw the same sentences, so scores and p values by language are those of
sacreBLEU's PairedTest, which has neither an average over languages nor the intervals of gains. A
model with several runs has the mean of their scores, in each resampling.
"""

import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from sacrebleu import significance

from lingvo_gshard.evaluation import quality
from lingvo_gshard.files import table

# A language's references, and its translations by each run of both models.
_Texts = tuple[list[str], list[list[list[str]]]]


def tables(folders: Mapping[str, Sequence[pathlib.Path]], codes: Collection[str]) -> Iterator[str]:
    """Yields tables that compare the first model with each other one, by each available metric.

    The folders of runs, by the models' names, are what `--mode=decode` wrote, with the languages
    `codes`. ValueError for one model only, SACREBLEU_SEED `none`, missing files, or other
    references.
    """
    (first, base), *others = folders.items()
    if not others:
        raise ValueError(
            f"--paired: {first} is the only model; give a --run of another to compare with."
        )
    if os.environ.get("SACREBLEU_SEED", "").lower() == "none":
        raise ValueError("--paired draws the same sentences for all runs; unset SACREBLEU_SEED.")
    for name, runs in others:
        texts = {code: _texts(base, runs, code) for code in codes}
        for metric in quality.available():
            yield _table(metric, (first, name), texts)


def _texts(base: Sequence[pathlib.Path], other: Sequence[pathlib.Path], code: str) -> _Texts:
    references = _lines(base[0] / f"{code}.reference.txt")
    for folder in (*base, *other):
        if _lines(folder / f"{code}.reference.txt") != references:
            raise ValueError(f"--paired: {base[0]} and {folder} have other references of {code}.")
    both = [[_lines(folder / f"{code}.txt") for folder in runs] for runs in (base, other)]
    return references, both


def _lines(path: pathlib.Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"--paired needs {path}; write it with --mode=decode.")
    return path.read_bytes().decode().split("\n")[:-1]


def _table(metric: str, names: tuple[str, str], texts: Mapping[str, _Texts]) -> str:
    scorer, samples = quality.METRICS[metric](), dict[str, list[np.ndarray]]()
    for code, (references, translations) in texts.items():
        samples[code] = [
            np.mean([quality.samples(scorer, lines, references) for lines in runs], axis=0)
            for runs in translations
        ]
    samples["average"] = [np.mean(each, axis=0) for each in zip(*samples.values(), strict=True)]
    rows = [["language", *names, "gain", "from", "to", "p"]]
    rows += [[code, *_cells(*both)] for code, both in samples.items()]
    return f"{table.text(rows)}\nsacreBLEU paired {metric} {scorer.get_signature()}"


def _cells(base: np.ndarray, other: np.ndarray) -> list[str]:
    """Both scores, the gain, its 95 % interval and its p value."""
    gain, *gains = (other - base).tolist()
    distances, tail = np.abs(gains), len(gains) // 40
    p = significance._compute_p_value(distances - distances.mean(), abs(gain))
    low, high = np.sort(gains)[[tail, -1 - tail]]
    scores = [f"{base[0]:.2f}", f"{other[0]:.2f}"]
    return [*scores, *(f"{each:+.2f}" for each in (gain, low, high)), f"{p:.4f}"]
