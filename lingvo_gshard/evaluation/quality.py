"""Translation quality by sacreBLEU, by language, and against training size."""

import collections
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
from lingvo_gshard.evaluation import tokenization
from lingvo_gshard.files import atomic_file, json_records, storage, table

# Resamplings of the sentences; sacreBLEU's signature contains their number and its seed.
BOOTSTRAPS = 1000
# The tokenizer's model of spBLEU, which sacreBLEU would download otherwise.
SPBLEU_MODEL = pathlib.Path(SACREBLEU_DIR, "models", "flores200sacrebleuspm")

# The metrics in the order of the columns, of a target like English; see `scorer_for`. The keys are
# fields of a LanguageQuality.
METRICS: dict[str, Callable[[], Metric]] = {
    "bleu": BLEU,
    "chrf": CHRF,
    "chrfpp": functools.partial(CHRF, word_order=2),
    "spbleu": functools.partial(BLEU, tokenize="flores200"),
}
TITLES = {"bleu": "BLEU", "chrf": "chrF", "chrfpp": "chrF++", "spbleu": "spBLEU"}


@dataclasses.dataclass(frozen=True)
class Score:
    """A score from 0 to 100, half of its 95 % confidence interval, and sacreBLEU's signature.

    One sentence has no interval: its margin is None.
    """

    value: float
    margin: float | None
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

    def is_alike(self, metric: str) -> bool:
        """Returns whether a metric has the same tokens in all languages, so that means compare."""
        return len(set(self.tokens(metric).values())) == 1

    def tokens(self, metric: str) -> dict[str, str]:
        """Returns what a metric counts in the text of each language, as signatures name it."""
        return {
            language.code: tokenization.of_signature(language.score(metric).signature)
            for language in self.languages
        }

    def average(self, metric: str) -> float | None:
        """Returns the mean of a metric over languages, unweighted as in the paper.

        It is None if the languages are not scored alike.
        """
        if not self.is_alike(metric):
            return None
        return sum(self.values(metric).values()) / len(self.languages)

    def values(self, metric: str) -> dict[str, float]:
        """Returns a metric by language, most training pairs first."""
        return {language.code: language.score(metric).value for language in self.by_size()}

    def signatures(self, *metrics: str) -> list[str]:
        """Returns lines with sacreBLEU's signatures of metrics, usually one for each.

        A signature describes how sacreBLEU computed a score: only scores with equal ones compare.
        If there are several, each is followed by its languages.
        """
        lines = []
        for metric in metrics:
            codes: dict[str, list[str]] = collections.defaultdict(list)
            for language in self.by_size():
                codes[language.score(metric).signature].append(language.code)
            for signature in sorted(codes):
                languages = f": {', '.join(codes[signature])}" if len(codes) > 1 else ""
                lines.append(f"sacreBLEU {metric} {signature}{languages}")
        return lines

    def notes(self) -> list[str]:
        """Returns why there is no average of BLEU, if there is none, and what compares instead."""
        if self.is_alike("bleu"):
            return []
        note = "BLEU has no average, since its tokens differ by language; "
        if "spbleu" in self.metrics:
            return [f"{note}spBLEU has one."]
        return [f"{note}spBLEU would have one, with its tokenizer's model in {SPBLEU_MODEL}."]

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
                row += [table.number(score.value), table.number(score.margin)]
            rows.append(row)

        averages = ["average", "", ""]
        for metric in self.metrics:
            averages += [table.number(self.average(metric)), ""]

        return [header, *rows, averages]

    def table(self) -> str:
        """Returns the rows as text, and the signatures and notes below them."""
        signatures = self.signatures(*self.metrics)
        return "\n".join([table.text(self.rows()), *signatures, *self.notes()])

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the averages and the languages as JSON."""
        fields: dict[str, Any] = {}
        for metric in self.metrics:
            average = self.average(metric)
            if average is not None:
                fields[f"average_{metric}"] = average
        fields["languages"] = [dataclasses.asdict(language) for language in self.by_size()]
        atomic_file.write(path, json.dumps(fields, indent=2) + "\n")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG of BLEU and its margin against training pairs, as in Figure 6.

        It shows spBLEU if that alone is scored alike in all languages.
        """
        metric = main_metric([self])
        figure = mpl_figure.Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()

        # The bars are 95 % confidence intervals.
        for language in self.by_size():
            score = language.score(metric)
            point = (language.train_pairs, score.value)
            axes.errorbar(*point, score.margin, fmt="o", markersize=4, color="C0", elinewidth=0.8)
            axes.annotate(language.code, point, xytext=(3, 3), textcoords="offset points", size=8)

        name = TITLES[metric]
        title = f"{name} by language"
        average = self.average(metric)
        if average is not None:
            axes.axhline(average, linestyle="--", linewidth=1, color="gray")
            title += f", average {average:.1f} (dashed)"
        else:
            title += ", whose tokens differ"

        # A language that was never trained on has no place on a scale of logarithms.
        has_all = all(language.train_pairs for language in self.languages)
        axes.set_xscale("log" if has_all else "symlog")
        axes.set(xlabel="training pairs", ylabel=name, ylim=(0, None))
        axes.set_title(title)
        figure.savefig(path, dpi=130)


def main_metric(runs: Sequence[Quality]) -> str:
    """Returns the metric of pictures: BLEU, or spBLEU if that alone is alike in all languages."""
    has_spbleu = all("spbleu" in run.metrics for run in runs)
    if has_spbleu and not all(run.is_alike("bleu") for run in runs):
        return "spbleu"
    return "bleu"


def load(path: str | os.PathLike[str]) -> Quality:
    """Returns a saved Quality. Raises ValueError if the file is missing or damaged."""
    try:
        return json_records.read(
            Quality, json_records.parse(storage.path(path).read_text(encoding="utf-8"))
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        reason = "there is no such file" if is_missing else repr(error)
        raise ValueError(
            f"{path}: holds no scores by language ({reason}); write it with --mode=decode."
        ) from error


def available() -> list[str]:
    """Returns the metrics that can be computed: spBLEU only if its tokenizer's model is there."""
    if SPBLEU_MODEL.is_file():
        return list(METRICS)
    return [metric for metric in METRICS if metric != "spbleu"]


def scorer_for(metric: str, target: str = "en") -> Metric:
    """Returns sacreBLEU's scorer of one of METRICS, for text in the language `target`."""
    if metric == "bleu":
        return BLEU(tokenize=tokenization.of_target(target))
    return METRICS[metric]()


def score(
    metric: str, hypotheses: Sequence[str], references: Sequence[str], target: str = "en"
) -> Score:
    """Returns the score of a corpus by one of METRICS, in the language `target`.

    Raises ValueError unless there is a reference for each line, and at least one line.
    """
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"got {len(hypotheses)} hypotheses and {len(references)} references to score; expected "
            "equally many, and at least one."
        )

    scorer = scorer_for(metric, target)
    # The interval contains 95 % of the resamplings' scores.
    value, *resampled = samples(scorer, hypotheses, references)
    margin = None
    if len(hypotheses) > 1:  # All resamplings of one sentence are that sentence.
        margin = float(significance.estimate_ci(np.array(resampled))[1])
    return Score(float(value), margin, str(scorer.get_signature()))


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
