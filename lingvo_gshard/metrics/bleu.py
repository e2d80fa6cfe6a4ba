"""BLEU by sacreBLEU, with the signature that says how it was computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sacrebleu.metrics import BLEU


@dataclasses.dataclass(frozen=True)
class Bleu:
    """A corpus' BLEU, 0 to 100, and sacreBLEU's signature."""

    score: float
    signature: str


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of hypotheses against one reference each, sacreBLEU's defaults.

    Raises:
      ValueError: none, or another number of references.
    """
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"corpus_bleu: {len(hypotheses)} hypotheses and {len(references)} references; as "
            "many of both, and one or more, are expected."
        )
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Bleu(score, str(metric.get_signature()))
