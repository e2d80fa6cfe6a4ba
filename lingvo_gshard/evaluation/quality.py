"""Translation quality: BLEU and chrF by sacreBLEU, by language, and against training size."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.chrf import CHRFScore

from lingvo_gshard.core import json_records, table

# Resamplings of the sentences; sacreBLEU's signature contains their number and its seed.
_BOOTSTRAPS = 1000


class _Chrf(CHRF):
    """chrF with float scores: sacreBLEU's bootstrap fails if some of them are NumPy scalars."""

    def _compute_score_from_stats(self, stats: list[int]) -> CHRFScore:
        score = super()._compute_score_from_stats(stats)
        score.score = float(score.score)
        return score


METRICS: dict[str, type[Metric]] = {"bleu": BLEU, "chrf": _Chrf}


@dataclasses.dataclass(frozen=True)
class Score:
    """A score from 0 to 100, half of its 95 % confidence interval, and sacreBLEU's signature."""

    value: float
    margin: float
    signature: str


@dataclasses.dataclass(frozen=True)
class LanguageQuality:
    """The number of training pairs and of decoded sentences of a language, and their scores."""

    code: str
    train_pairs: int
    sentences: int
    bleu: Score
    chrf: Score


@dataclasses.dataclass(frozen=True)
class Quality:
    """The scores of one or more languages."""

    languages: tuple[LanguageQuality, ...]

    def average(self, metric: str) -> float:
        """The mean of `bleu` or `chrf` over languages, unweighted as in the paper."""
        return sum(getattr(row, metric).value for row in self.languages) / len(self.languages)

    def bleu(self) -> dict[str, float]:
        """BLEU by language, most training pairs first."""
        return {row.code: row.bleu.value for row in self.by_size()}

    def by_size(self) -> list[LanguageQuality]:
        """The languages, most training pairs first, as the paper orders them."""
        return sorted(self.languages, key=lambda row: (-row.train_pairs, row.code))

    def table(self) -> str:
        """A table of the languages' scores and margins, the averages and signatures."""
        rows = [["language", "train pairs", "sentences", "BLEU", "+-", "chrF", "+-"]]
        for row in self.by_size():
            scores = (row.bleu.value, row.bleu.margin, row.chrf.value, row.chrf.margin)
            cells = (f"{number:.2f}" for number in scores)
            rows.append([row.code, str(row.train_pairs), str(row.sentences), *cells])
        averages = [f"{self.average(metric):.2f}" for metric in METRICS]
        lines = [table.text([*rows, ["average", "", "", averages[0], "", averages[1], ""]])]
        for metric in METRICS:
            signatures = sorted({getattr(row, metric).signature for row in self.languages})
            lines += [f"sacreBLEU {metric} {signature}" for signature in signatures]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the averages and the languages as JSON."""
        fields: dict[str, Any] = {f"average_{each}": self.average(each) for each in METRICS}
        fields["languages"] = [dataclasses.asdict(row) for row in self.by_size()]
        pathlib.Path(path).write_text(json.dumps(fields, indent=2) + "\n")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG of BLEU and its margin against training pairs, as in Figure 6."""
        figure = Figure(figsize=(7, 4.5), layout="constrained")
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
        return json_records.read(Quality, json.loads(pathlib.Path(path).read_text()))
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: holds no scores by language ({error!r}); write it with --mode=decode."
        ) from error


def score(metric: str, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """The `bleu` or `chrf` (chrF2) of a corpus, by sacreBLEU's defaults.

    Raises ValueError unless there are hypotheses, and one reference for each.
    """
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"got {len(hypotheses)} hypotheses and {len(references)} references to score; expected "
            "equally many, and at least one."
        )
    scorer = METRICS[metric]()
    result = scorer.corpus_score(list(hypotheses), [list(references)], n_bootstrap=_BOOTSTRAPS)
    return Score(result.score, result._ci, str(scorer.get_signature()))
