"""Figure 6: the gain of multilingual models over bilingual baselines, language by language."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure

from lingvo_gshard.evaluation.quality import LanguageQuality, Quality

# Languages that a point of the trend lines is the mean of, as in the paper.
WINDOW = 10


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Models' quality beside that of a model of each language's own.

    Attributes:
      models: the quality of each model by name, in the table's order.
      baselines: bilingual BLEU by language; a language may lack one.

    Raises:
      ValueError: no models, or of other languages or training sizes than each other; or a
        baseline of a language that they lack.
    """

    models: Mapping[str, Quality]
    baselines: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("Comparison: no models to compare.")
        sizes = {
            name: {(row.code, row.train_pairs) for row in quality.languages}
            for name, quality in self.models.items()
        }
        (first, languages), *others = sizes.items()
        for name, found in others:
            if found != languages:
                differing = sorted({code for code, _ in found ^ languages})
                raise ValueError(
                    f"Comparison: {first} and {name} differ in languages or their training pairs: "
                    f"{', '.join(differing)}."
                )

        unknown = sorted(self.baselines.keys() - {code for code, _ in languages})
        if unknown:
            raise ValueError(f"Comparison: {first} has no {', '.join(unknown)}, a baseline's.")

    def by_size(self) -> list[LanguageQuality]:
        """The languages, most training pairs first, with the first model's scores."""
        return next(iter(self.models.values())).by_size()

    def gains(self, model: str) -> dict[str, float]:
        """BLEU less the baseline's, by language, most training pairs first."""
        return {
            row.code: row.bleu.value - self.baselines[row.code]
            for row in self.models[model].by_size()
            if row.code in self.baselines
        }

    def table(self) -> str:
        """A row a language: training pairs, the baseline's BLEU, each model's, and its gain."""
        width = max(10, *(len(name) + 2 for name in self.models))
        models = "".join(f"{name:>{width}}{'gain':>8}" for name in self.models)
        lines = [f"{'language':<10}{'train pairs':>12}{'baseline':>10}{models}"]
        for row in self.by_size():
            baseline = _number(self.baselines.get(row.code), 10)
            lines.append(f"{row.code:<10}{row.train_pairs:>12}{baseline}")
            for name, quality in self.models.items():
                bleu = {r.code: r.bleu.value for r in quality.languages}[row.code]
                lines[-1] += f"{bleu:>{width}.2f}{_number(self.gains(name).get(row.code), 8, '+')}"
        lines.append(f"{'average':<10}{'':>12}{_number(_mean(self.baselines.values()), 10)}")
        for name, quality in self.models.items():
            gain = _number(_mean(self.gains(name).values()), 8, "+")
            lines[-1] += f"{quality.average_bleu:>{width}.2f}{gain}"
        return "\n".join(lines)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG: gains, or BLEU where there are no baselines, by language and smoothed."""
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        codes = [row.code for row in self.by_size() if not self.baselines or self._has(row)]
        for name, quality in self.models.items():
            bleu = {row.code: row.bleu.value for row in quality.languages}
            values = self.gains(name) if self.baselines else bleu
            heights = [values[code] for code in codes]
            (line,) = axes.plot(smoothed(heights), label=name)
            axes.plot(heights, ".", markersize=4, color=line.get_color(), alpha=0.4)
        if self.baselines:
            axes.axhline(0, linestyle="--", linewidth=1, color="gray")
        axes.set_xticks(range(len(codes)), codes, rotation=90, size=6)
        axes.set(
            xlabel="languages, from most to fewest training pairs",
            ylabel="BLEU over the bilingual baseline" if self.baselines else "BLEU",
        )
        axes.legend()
        figure.savefig(path, dpi=130)

    def _has(self, row: LanguageQuality) -> bool:
        return row.code in self.baselines


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The means of sliding windows about each value; the values, if they are fewer than a window.

    At the ends a window holds what there is of it.
    """
    if len(values) < window:
        return list(values)
    before, after = window // 2, window - window // 2
    parts = (values[max(0, i - before) : i + after] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def _number(value: float | None, width: int, sign: str = "") -> str:
    return f"{'-' if value is None else format(value, f'{sign}.2f'):>{width}}"
