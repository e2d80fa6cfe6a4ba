"""Translation quality by language: a table, and BLEU against training size (Figure 6's axes)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class LanguageQuality:
    """A language's training pairs, sentences decoded, and BLEU with its signature."""

    code: str
    train_pairs: int
    sentences: int
    bleu: float
    signature: str


@dataclasses.dataclass(frozen=True)
class Quality:
    """All languages of one decode; one or more."""

    languages: tuple[LanguageQuality, ...]

    @property
    def average_bleu(self) -> float:
        """The mean over languages, each counting once, as in the paper."""
        return sum(row.bleu for row in self.languages) / len(self.languages)

    def by_size(self) -> list[LanguageQuality]:
        """Most training pairs first, as the paper orders its languages."""
        return sorted(self.languages, key=lambda row: (-row.train_pairs, row.code))

    def table(self) -> str:
        """A row a language: code, training pairs, sentences, BLEU; then the average."""
        lines = [f"{'language':<10}{'train pairs':>12}{'sentences':>11}{'BLEU':>8}"]
        lines += [
            f"{row.code:<10}{row.train_pairs:>12}{row.sentences:>11}{row.bleu:>8.2f}"
            for row in self.by_size()
        ]
        lines.append(f"{'average':<10}{'':>12}{'':>11}{self.average_bleu:>8.2f}")
        signatures = sorted({row.signature for row in self.languages})
        return "\n".join([*lines, *(f"sacreBLEU {signature}" for signature in signatures)])

    def as_json(self) -> dict[str, Any]:
        """JSON values: average_bleu and the languages' rows."""
        rows = [dataclasses.asdict(row) for row in self.by_size()]
        return {"average_bleu": self.average_bleu, "languages": rows}


def draw(quality: Quality, path: str | os.PathLike[str]) -> None:
    """Writes a PNG of BLEU against training pairs, a labelled point a language."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = quality.by_size()
    axes.scatter([row.train_pairs for row in rows], [row.bleu for row in rows], s=18)
    for row in rows:
        axes.annotate(
            row.code, (row.train_pairs, row.bleu), xytext=(3, 3), textcoords="offset points", size=7
        )
    axes.axhline(quality.average_bleu, linestyle="--", linewidth=1, color="gray")
    axes.set(xscale="log", xlabel="training pairs", ylabel="BLEU", ylim=(0, None))
    axes.set_title(f"BLEU by language, average {quality.average_bleu:.1f} (dashed)")
    figure.savefig(path, dpi=130)
