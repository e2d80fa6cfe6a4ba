"""Translation quality by sacreBLEU: by language, and against training size."""

import collections
import dataclasses
import functools
import html
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
from xla_spmd.files import atomic_file, json_records, storage, table

# Bootstrap samples of the sentences; sacreBLEU's signature contains their number and the seed.
BOOTSTRAPS = 1000
# The model of spBLEU's tokenizer, which sacreBLEU would otherwise download.
SPBLEU_MODEL = pathlib.Path(SACREBLEU_DIR, "models", "flores200sacrebleuspm")

# The metrics in the order of the columns, for a target like English; see `scorer_for`. The keys are
# fields of LanguageQuality.
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

    A single sentence does not have an interval: its margin is None.
    """

    value: float
    margin: float | None
    signature: str


@dataclasses.dataclass(frozen=True)
class LanguageQuality:
    """A language's numbers of training pairs and of decoded sentences, and its scores.

    `cut_share` is the share of translations, 0 to 1, that were cut at the maximum length.
    """

    code: str
    train_pairs: int
    sentences: int
    bleu: Score
    chrf: Score
    chrfpp: Score
    spbleu: Score | None = None  # None if the model of its tokenizer is missing.
    cut_share: float | None = None  # None in files of earlier versions, which lack it.

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
        """Returns whether a metric counts the same tokens in all languages, so means make sense."""
        return len(set(self.tokens(metric).values())) == 1

    def tokens(self, metric: str) -> dict[str, str]:
        """Returns the tokens that a metric counts in each language, as signatures name them."""
        return {
            language.code: tokenization.of_signature(language.score(metric).signature)
            for language in self.languages
        }

    def average(self, metric: str) -> float | None:
        """Returns the mean of a metric over languages, unweighted as in the paper.

        It is None if the languages are scored by different tokens.
        """
        if not self.is_alike(metric):
            return None
        return sum(self.values(metric).values()) / len(self.languages)

    def values(self, metric: str) -> dict[str, float]:
        """Returns a metric by language, most training pairs first."""
        return {language.code: language.score(metric).value for language in self.by_size()}

    def signatures(self, *metrics: str) -> list[str]:
        """Returns lines with sacreBLEU's signatures of metrics, usually one for each.

        A signature describes how sacreBLEU computed a score: only scores with equal signatures are
        comparable. If there are several, each is followed by its languages.
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
        """If BLEU cannot be averaged, returns the reason, and the metric to average instead."""
        if self.is_alike("bleu"):
            return []
        note = "BLEU is not averaged, since its tokens differ by language; "
        if "spbleu" in self.metrics:
            return [f"{note}use the average of spBLEU."]
        return [f"{note}to average spBLEU instead, put its tokenizer's model at {SPBLEU_MODEL}."]

    def by_size(self) -> list[LanguageQuality]:
        """Returns the languages, most training pairs first, in the paper's order."""
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
        """Returns the rows as text, followed by the signatures and notes."""
        signatures = self.signatures(*self.metrics)
        return "\n".join([table.text(self.rows()), *signatures, *self.notes()])

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        below = [*self.signatures(*self.metrics), *self.notes()]
        lines = "<br>".join(html.escape(line) for line in below)
        return f"{table.as_html(self.rows())}\n<small>{lines}</small>"

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

        It shows spBLEU if only spBLEU is scored by the same tokens in all languages.
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

        # A language without training pairs does not fit on a logarithmic scale.
        has_all = all(language.train_pairs for language in self.languages)
        axes.set_xscale("log" if has_all else "symlog")
        axes.set(xlabel="training pairs", ylabel=name, ylim=(0, None))
        axes.set_title(title)
        figure.savefig(path, dpi=130)


def main_metric(runs: Sequence[Quality]) -> str:
    """Returns the metric for pictures: spBLEU if only that has equal tokens everywhere, or BLEU."""
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
            f"{path} is not a file of scores by language ({reason}); write it with --mode=decode."
        ) from error


def available() -> list[str]:
    """Returns the available metrics: spBLEU only if the model of its tokenizer is there."""
    if SPBLEU_MODEL.is_file():
        return list(METRICS)
    return [metric for metric in METRICS if metric != "spbleu"]


def scorer_for(metric: str, target: str = "en") -> Metric:
    """Returns sacreBLEU's scorer for one of METRICS, for text in the language `target`."""
    if metric == "bleu":
        return BLEU(tokenize=tokenization.of_target(target))
    return METRICS[metric]()


def score(
    metric: str, hypotheses: Sequence[str], references: Sequence[str], target: str = "en"
) -> Score:
    """Returns the score of a corpus by one of METRICS, for text in the language `target`.

    Raises ValueError if there are not as many references as lines, or no lines at all.
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
    if len(hypotheses) > 1:  # All bootstrap samples of a single sentence are equal.
        margin = float(significance.estimate_ci(np.array(resampled))[1])
    return Score(float(value), margin, str(scorer.get_signature()))


def samples(scorer: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Returns the score of a corpus, then the scores of its bootstrap samples: [1 + BOOTSTRAPS].

    The scorer's signature then contains the number of samples and their seed.
    """
    # sacreBLEU's public functions return only the interval, not the scores behind it. Sentences
    # are counted once; a bootstrap sample adds up the counts of the sentences that it draws.
    statistics = scorer._extract_corpus_statistics(hypotheses, [references])
    scorer.n_bootstrap = BOOTSTRAPS
    scorer.seed, resampled = significance._bootstrap_resample(statistics, scorer, BOOTSTRAPS)
    whole = scorer._aggregate_and_compute(statistics)
    return np.array([sample.score for sample in [whole, *resampled]])
