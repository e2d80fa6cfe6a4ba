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

from lingvo_gshard.core.late import figure as mpl_figure
from lingvo_gshard.files import atomic_file, json_records, storage, table

# Resamplings of the sentences; sacreBLEU's signature contains their number and its seed.
BOOTSTRAPS = 1000
# The tokenizer's model of spBLEU, which sacreBLEU would download otherwise.
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
    chrfpp: Score
    spbleu: Score | None = None  # None without its tokenizer's model.

    def score(self, metric: str) -> Score:
        """Returns the score of a metric that the language has."""
        return getattr(self, metric)


@dataclasses.dataclass(frozen=True)
class Quality:
    """The scores of one or more languages."""

    languages: tuple[LanguageQuality, ...]

    @property
    def metrics(self) -> list[str]:
        """The metrics that all languages have."""
        metrics = []
        for metric in METRICS:
            if all(getattr(language, metric) for language in self.languages):
                metrics.append(metric)
        return metrics

    def average(self, metric: str) -> float:
        """Returns the mean of a metric over languages, unweighted as in the paper."""
        return sum(self.values(metric).values()) / len(self.languages)

    def values(self, metric: str) -> dict[str, float]:
        """Returns a metric by language, most training pairs first."""
        return {language.code: language.score(metric).value for language in self.by_size()}

    def signatures(self, *metrics: str) -> list[str]:
        """Returns lines with sacreBLEU's signatures of metrics, usually one for each.

        A signature tells how sacreBLEU computed a score: only equal ones compare.
        """
        lines = []
        for metric in metrics:
            signatures = {language.score(metric).signature for language in self.languages}
            lines += [f"sacreBLEU {metric} {signature}" for signature in sorted(signatures)]
        return lines

    def by_size(self) -> list[LanguageQuality]:
        """Returns the languages, most training pairs first, as the paper orders them."""
        return sorted(self.languages, key=lambda row: (-row.train_pairs, row.code))

    def rows(self) -> list[list[str]]:
        """Returns a header, the languages' scores with their margins, and the averages."""
        header = ["language", "train pairs", "sentences"]
        for metric in self.metrics:
            header += [TITLES[metric], "+-"]

        rows = []
        for language in self.by_size():
            row = [language.code, f"{language.train_pairs:,}", str(language.sentences)]
            for metric in self.metrics:
                score = language.score(metric)
                row += [f"{score.value:.2f}", f"{score.margin:.2f}"]
            rows.append(row)

        averages = ["average", "", ""]
        for metric in self.metrics:
            averages += [f"{self.average(metric):.2f}", ""]

        return [header, *rows, averages]

    def table(self) -> str:
        """Returns the rows as text, and the signatures below them."""
        return "\n".join([table.text(self.rows()), *self.signatures(*self.metrics)])

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the averages and the languages as JSON."""
        fields: dict[str, Any] = {}
        for metric in self.metrics:
            fields[f"average_{metric}"] = self.average(metric)
        fields["languages"] = [dataclasses.asdict(language) for language in self.by_size()]
        atomic_file.write(path, json.dumps(fields, indent=2) + "\n")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG of BLEU and its margin against training pairs, as in Figure 6."""
        figure = mpl_figure.Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()

        # The bars are 95 % confidence intervals.
        for language in self.by_size():
            point = (language.train_pairs, language.bleu.value)
            axes.errorbar(
                *point, language.bleu.margin, fmt="o", markersize=4, color="C0", elinewidth=0.8
            )
            axes.annotate(language.code, point, xytext=(3, 3), textcoords="offset points", size=8)

        average = self.average("bleu")
        axes.axhline(average, linestyle="--", linewidth=1, color="gray")
        axes.set(xscale="log", xlabel="training pairs", ylabel="BLEU", ylim=(0, None))
        axes.set_title(f"BLEU by language, average {average:.1f} (dashed)")
        figure.savefig(path, dpi=130)


def load(path: str | os.PathLike[str]) -> Quality:
    """Returns a saved Quality. Raises ValueError if the file is missing or damaged."""
    try:
        return json_records.read(Quality, json.loads(storage.path(path).read_text()))
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: holds no scores by language ({error!r}); write it with --mode=decode."
        ) from error


def available() -> list[str]:
    """Returns the metrics that can be computed: spBLEU only if its tokenizer's model is there."""
    if SPBLEU_MODEL.is_file():
        return list(METRICS)
    return [metric for metric in METRICS if metric != "spbleu"]


def score(metric: str, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Returns the score of a corpus by one of METRICS.

    Raises ValueError unless there is a reference for each line, and at least one line.
    """
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"got {len(hypotheses)} hypotheses and {len(references)} references to score; expected "
            "equally many, and at least one."
        )

    scorer = METRICS[metric]()
    # The interval contains 95 % of the resamplings' scores.
    value, *resampled = samples(scorer, hypotheses, references)
    _, margin = significance.estimate_ci(np.array(resampled))
    return Score(float(value), float(margin), str(scorer.get_signature()))


def samples(scorer: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Returns the score of a corpus, and after it those of its resamplings: [1 + BOOTSTRAPS].

    The scorer's signature then contains the number of resamplings and their seed.
    """
    # sacreBLEU's public functions return the interval alone, not the scores that it is made of.
    # Sentences are counted once; a resampling adds up the counts of those that it draws.
    statistics = scorer._extract_corpus_statistics(hypotheses, [references])
    scorer.n_bootstrap = BOOTSTRAPS
    scorer.seed, resampled = significance._bootstrap_resample(statistics, scorer, BOOTSTRAPS)
    whole = scorer._aggregate_and_compute(statistics)
    return np.array([sample.score for sample in [whole, *resampled]])
