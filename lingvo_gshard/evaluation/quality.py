"""Translation quality by language: a table, and BLEU against training size (Figure 6's axes)."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from matplotlib.figure import Figure

from lingvo_gshard.evaluation.scores import Score


@dataclasses.dataclass(frozen=True)
class LanguageQuality:
    """A language's training pairs, sentences decoded, and their scores."""

    code: str
    train_pairs: int
    sentences: int
    bleu: Score
    chrf: Score


@dataclasses.dataclass(frozen=True)
class Quality:
    """All languages of one decode; one or more."""

    languages: tuple[LanguageQuality, ...]

    @property
    def average_bleu(self) -> float:
        """The mean over languages, each counting once, as in the paper."""
        return sum(row.bleu.value for row in self.languages) / len(self.languages)

    @property
    def average_chrf(self) -> float:
        """As average_bleu."""
        return sum(row.chrf.value for row in self.languages) / len(self.languages)

    def by_size(self) -> list[LanguageQuality]:
        """Most training pairs first, as the paper orders its languages."""
        return sorted(self.languages, key=lambda row: (-row.train_pairs, row.code))

    def table(self) -> str:
        """A row a language: code, training pairs, sentences, BLEU and chrF with the margins of
        their 95 % confidence intervals; then the averages and the signatures."""
        lines = [
            f"{'language':<10}{'train pairs':>12}{'sentences':>11}{'BLEU':>8}{'+-':>6}"
            f"{'chrF':>8}{'+-':>6}"
        ]
        lines += [
            f"{row.code:<10}{row.train_pairs:>12}{row.sentences:>11}"
            f"{row.bleu.value:>8.2f}{row.bleu.margin:>6.2f}"
            f"{row.chrf.value:>8.2f}{row.chrf.margin:>6.2f}"
            for row in self.by_size()
        ]
        averages = f"{self.average_bleu:>8.2f}{'':>6}{self.average_chrf:>8.2f}"
        lines.append(f"{'average':<10}{'':>12}{'':>11}{averages}")
        for name in ("bleu", "chrf"):
            signatures = sorted({getattr(row, name).signature for row in self.languages})
            lines += [f"sacreBLEU {name} {signature}" for signature in signatures]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON: the averages and the languages' rows."""
        fields: dict[str, Any] = {
            "average_bleu": self.average_bleu,
            "average_chrf": self.average_chrf,
            "languages": [dataclasses.asdict(row) for row in self.by_size()],
        }
        pathlib.Path(path).write_text(json.dumps(fields, indent=2) + "\n")


def load(path: str | os.PathLike[str]) -> Quality:
    """Reads what `Quality.save` wrote; ValueError: no such file, or something else."""
    try:
        rows = json.loads(pathlib.Path(path).read_text())["languages"]
        return Quality(tuple(_row(fields) for fields in rows))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: holds no scores by language ({error!r}); write it with --mode=decode."
        ) from error


def draw(quality: Quality, path: str | os.PathLike[str]) -> None:
    """Writes a PNG of BLEU against training pairs, a labelled point a language, with margins."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in quality.by_size():
        at = (row.train_pairs, row.bleu.value)
        axes.errorbar(*at, row.bleu.margin, fmt="o", markersize=4, color="C0", elinewidth=0.8)
        axes.annotate(row.code, at, xytext=(3, 3), textcoords="offset points", size=7)
    axes.axhline(quality.average_bleu, linestyle="--", linewidth=1, color="gray")
    axes.set(xscale="log", xlabel="training pairs", ylabel="BLEU", ylim=(0, None))
    axes.set_title(f"BLEU by language, average {quality.average_bleu:.1f} (dashed)")
    figure.savefig(path, dpi=130)


def _row(fields: dict[str, Any]) -> LanguageQuality:
    scores = {name: Score(**fields[name]) for name in ("bleu", "chrf")}
    return LanguageQuality(**{**fields, **scores})
