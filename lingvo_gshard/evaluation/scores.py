"""BLEU and chrF by sacreBLEU, with the signature that says how each was computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.chrf import CHRFScore

# Of the sentences, drawn with replacement; sacreBLEU's seed is part of the signature.
_BOOTSTRAPS = 1000


@dataclasses.dataclass(frozen=True)
class Score:
    """A corpus' score.

    Attributes:
      value: 0 to 100.
      margin: half of the 95 % confidence interval, by bootstrap.
      signature: sacreBLEU's.
    """

    value: float
    margin: float
    signature: str


class _Chrf(CHRF):
    """chrF whose scores are floats: sacreBLEU's bootstrap fails where some are NumPy's."""

    def _compute_score_from_stats(self, stats: list[int]) -> CHRFScore:
        score = super()._compute_score_from_stats(stats)
        score.score = float(score.score)
        return score


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """BLEU of hypotheses against one reference each, sacreBLEU's defaults.

    Raises:
      ValueError: none, or another number of references.
    """
    return _score("corpus_bleu", BLEU(), hypotheses, references)


def corpus_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """chrF2 of hypotheses against one reference each; as corpus_bleu."""
    return _score("corpus_chrf", _Chrf(), hypotheses, references)


def _score(
    name: str, metric: Metric, hypotheses: Sequence[str], references: Sequence[str]
) -> Score:
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"{name}: {len(hypotheses)} hypotheses and {len(references)} references; as many of "
            "both, and one or more, are expected."
        )
    result = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=_BOOTSTRAPS)
    return Score(result.score, result._ci, str(metric.get_signature()))
