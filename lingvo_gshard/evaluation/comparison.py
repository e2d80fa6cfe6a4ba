"""Figure 6: the gain of multilingual models over bilingual baselines, language by language."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence

from matplotlib.figure import Figure

from lingvo_gshard.core import table
from lingvo_gshard.evaluation.quality import LanguageQuality, Quality

# The trend lines are means over this many languages, as in the paper.
WINDOW = 10


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The quality of some models, and of bilingual baselines.

    Attributes:
      models: the quality of each model by name, in the order of the table.
      baselines: the BLEU of bilingual models by language; languages may be missing.

    Raises:
      ValueError: there are no models, they differ in languages or training pairs, or a baseline's
        language is not among theirs.
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
            raise ValueError(
                f"Comparison: there are baselines for {', '.join(unknown)}, which {first} lacks."
            )

    def by_size(self) -> list[LanguageQuality]:
        """Returns the languages, most training pairs first, with the first model's scores."""
        return next(iter(self.models.values())).by_size()

    def gains(self, model: str) -> dict[str, float]:
        """Returns BLEU minus the baseline's by language, most training pairs first."""
        return {
            row.code: row.bleu.value - self.baselines[row.code]
            for row in self.models[model].by_size()
            if row.code in self.baselines
        }

    def table(self) -> str:
        """Returns a table of training pairs, baselines' BLEU, and each model's BLEU and gain."""
        header = ["language", "train pairs", "baseline"]
        averages = ["average", "", _mean(self.baselines.values())]
        rows = [
            [row.code, str(row.train_pairs), table.number(self.baselines.get(row.code))]
            for row in self.by_size()
        ]
        for name, quality in self.models.items():
            bleu, gains = _bleu(quality), self.gains(name)
            header += [name, "gain"]
            averages += [_mean(bleu.values()), _mean(gains.values(), "+.2f")]
            for row in rows:
                row += [f"{bleu[row[0]]:.2f}", table.number(gains.get(row[0]), "+.2f")]
        return table.text([header, *rows, averages])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG of the gains by language, or of BLEU without baselines, with trend lines."""
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        codes = [row.code for row in self.by_size()]
        codes = [code for code in codes if not self.baselines or code in self.baselines]
        for name, quality in self.models.items():
            values = self.gains(name) if self.baselines else _bleu(quality)
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


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Returns the mean of a sliding window around each value; fewer values stay as they are.

    At the ends a window is cut off.
    """
    if len(values) < window:
        return list(values)
    before, after = window // 2, window - window // 2
    parts = (values[max(0, i - before) : i + after] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _bleu(quality: Quality) -> dict[str, float]:
    return {row.code: row.bleu.value for row in quality.languages}


def _mean(values: Collection[float], spec: str = ".2f") -> str:
    return table.number(sum(values) / len(values) if values else None, spec)
