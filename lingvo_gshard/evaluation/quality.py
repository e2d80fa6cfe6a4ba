"""Translation quality by sacreBLEU, by language, and against training size."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sacrebleu import significance
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.utils import SACREBLEU_DIR

from lingvo_gshard.core import late
from lingvo_gshard.files import atomic_file, json_records, storage, table

# Resamplings of the sentences; sacreBLEU's signature contains their number and its seed.
BOOTSTRAPS = 1000
# sacreBLEU would download it otherwise.
SPBLEU_MODEL = pathlib.Path(SACREBLEU_DIR, "models", "flores200sacrebleuspm")


# The metrics in the order of the columns; the keys are fields of a LanguageQuality.
METRICS: dict[str, Callable[[], Metric]] = {
    "bleu": BLEU,
    "chrf": CHRF,
    "chrfpp": functools.partial(CHRF, word_order=2),
    "spbleu": functools.partial(BLEU, tokenize="flores200"),
}
TITLES = {"bleu": "BLEU", "chrf": "chrF", "chrfpp": "chrF++", "spbleu": "spBLEU"}


@dataclasses.dataclass(frozen=True)
class Score:
    """A score from 0 to 100, half of its 95 % confidence interval, and sacreBLEU's signature."""

    value: float
    margin: float
    signature: str


@dataclasses.dataclass(frozen=True)
class LanguageQuality:
    """The numbers of training pairs and of decoded sentences of a language, and their scores."""

    code: str
    train_pairs: int
    sentences: int
    bleu: Score
    chrf: Score
    chrfpp: Score | None = None  # Earlier versions wrote none.
    spbleu: Score | None = None  # It needs its tokenizer's model.


@dataclasses.dataclass(frozen=True)
class Quality:
    """The scores of one or more languages."""

    languages: tuple[LanguageQuality, ...]

    @property
    def metrics(self) -> list[str]:
        """The metrics that all languages have."""
        return [each for each in METRICS if all(getattr(row, each) for row in self.languages)]

    def average(self, metric: str) -> float:
        """The mean of a metric over languages, unweighted as in the paper."""
        return sum(self.values(metric).values()) / len(self.languages)

    def values(self, metric: str) -> dict[str, float]:
        """A metric by language, most training pairs first."""
        return {row.code: getattr(row, metric).value for row in self.by_size()}

    def signatures(self, *metrics: str) -> list[str]:
        """The lines that tell how sacreBLEU computed metrics, usually one for each."""
        found = {name: {getattr(row, name).signature for row in self.languages} for name in metrics}
        return [f"sacreBLEU {name} {line}" for name in metrics for line in sorted(found[name])]

    def by_size(self) -> list[LanguageQuality]:
        """The languages, most training pairs first, as the paper orders them."""
        return sorted(self.languages, key=lambda row: (-row.train_pairs, row.code))

    def rows(self) -> list[list[str]]:
        """Returns a header, the languages' scores with their margins, and the averages."""
        header, averages = ["language", "train pairs", "sentences"], ["average", "", ""]
        rows = [[row.code, f"{row.train_pairs:,}", str(row.sentences)] for row in self.by_size()]
        for metric in self.metrics:
            header += [TITLES[metric], "+-"]
            averages += [f"{self.average(metric):.2f}", ""]
            for cells, row in zip(rows, self.by_size(), strict=True):
                found = getattr(row, metric)
                cells += [f"{found.value:.2f}", f"{found.margin:.2f}"]
        return [header, *rows, averages]

    def table(self) -> str:
        """Returns the rows as text, and the signatures below them."""
        return "\n".join([table.text(self.rows()), *self.signatures(*self.metrics)])

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the averages and the languages as JSON."""
        fields: dict[str, Any] = {f"average_{each}": self.average(each) for each in self.metrics}
        fields["languages"] = [dataclasses.asdict(row) for row in self.by_size()]
        atomic_file.write(path, json.dumps(fields, indent=2) + "\n")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG of BLEU and its margin against training pairs, as in Figure 6."""
        figure = late.figure.Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for row in self.by_size():
            at = (row.train_pairs, row.bleu.value)
            axes.errorbar(*at, row.bleu.margin, fmt="o", markersize=4, color="C0", elinewidth=0.8)
            axes.annotate(row.code, at, xytext=(3, 3), textcoords="offset points", size=7)
        axes.axhline(self.average("bleu"), linestyle="--", linewidth=1, color="gray")
        axes.set(xscale="log", xlabel="training pairs", ylabel="BLEU", ylim=(0, None))
        axes.set_title(f"BLEU by language, average {self.average('bleu'):.1f} (dashed)")
        figure.savefig(path, dpi=130)


def load(path: str | os.PathLike[str]) -> Quality:
    """Reads a saved Quality. Raises ValueError if the file is missing or damaged."""
    try:
        return json_records.read(Quality, json.loads(storage.path(path).read_text()))
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: holds no scores by language ({error!r}); write it with --mode=decode."
        ) from error


def available() -> list[str]:
    """The metrics that can be computed: spBLEU only if its tokenizer's model is there."""
    return [each for each in METRICS if each != "spbleu" or SPBLEU_MODEL.is_file()]


def score(metric: str, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """The score of a corpus by one of METRICS; ValueError unless each line has a reference."""
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"got {len(hypotheses)} hypotheses and {len(references)} references to score; expected "
            "equally many, and at least one."
        )
    scorer = METRICS[metric]()
    found = samples(scorer, hypotheses, references)
    _, margin = significance.estimate_ci(found[1:])
    return Score(float(found[0]), float(margin), str(scorer.get_signature()))


def samples(scorer: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """The score of a corpus, and after it those of its resamplings."""
    stats = scorer._extract_corpus_statistics(hypotheses, [references])
    scorer.n_bootstrap = BOOTSTRAPS
    scorer.seed, resampled = significance._bootstrap_resample(stats, scorer, BOOTSTRAPS)
    return np.array([each.score for each in (scorer._aggregate_and_compute(stats), *resampled)])
