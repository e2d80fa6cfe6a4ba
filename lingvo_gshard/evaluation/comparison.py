"""Figure 6: the gain of multilingual models over bilingual baselines, language by language."""

import dataclasses
import itertools
import os
from collections.abc import Collection, Mapping, Sequence

from lingvo_gshard.core import late
from lingvo_gshard.evaluation.quality import TITLES, Quality
from lingvo_gshard.files import table

# The trend lines are means over this many languages, as in the paper.
_WINDOW = 10


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A metric of models by name, and that of bilingual baselines by language.

    A model has one or more runs, whose scores are averaged. Raises ValueError unless all runs agree
    in languages, the baselines' among them, and their pairs.
    """

    models: Mapping[str, Sequence[Quality]]
    baselines: Mapping[str, float]
    metric: str = "bleu"

    def __post_init__(self) -> None:
        first, *_ = self.models
        sizes = [
            (name, {row.code: row.train_pairs for row in quality.languages})
            for name, runs in self.models.items()
            for quality in runs
        ]
        for name, found in sizes:
            if differing := sorted({code for code, _ in found.items() ^ sizes[0][1].items()}):
                raise ValueError(
                    f"Comparison: the first run of {first} and a run of {name} differ in languages "
                    f"or their training pairs: {', '.join(differing)}."
                )
        if unknown := sorted(self.baselines.keys() - sizes[0][1].keys()):
            raise ValueError(
                f"Comparison: there are baselines for {', '.join(unknown)}, which {first} lacks."
            )

    def scores(self, model: str) -> dict[str, float]:
        """The metric by language, most training pairs first: the mean of the model's runs."""
        runs = [quality.values(self.metric) for quality in self.models[model]]
        return {code: sum(each[code] for each in runs) / len(runs) for code in runs[0]}

    def gains(self, model: str) -> dict[str, float]:
        """The metric minus the baseline's by language, most training pairs first."""
        found = self.scores(model).items()
        return {code: of - self.baselines[code] for code, of in found if code in self.baselines}

    def table(self) -> str:
        """A table of training pairs, baselines, and each model's score and gain; signatures."""
        header = ["language", "train pairs", "baseline"]
        averages = ["average", "", _mean(self.baselines.values())]
        rows = [
            [row.code, str(row.train_pairs), table.number(self.baselines.get(row.code))]
            for row in next(iter(self.models.values()))[0].by_size()
        ]
        for name in self.models:
            found, gains = self.scores(name), self.gains(name)
            header += [name, "gain"]
            averages += [_mean(found.values()), _mean(gains.values(), "+.2f")]
            for row in rows:
                row += [f"{found[row[0]]:.2f}", table.number(gains.get(row[0]), "+.2f")]
        runs = itertools.chain.from_iterable(self.models.values())
        signatures = sorted(set().union(*(quality.signatures(self.metric) for quality in runs)))
        return "\n".join([table.text([header, *rows, averages]), *signatures])

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG of the gains by language, or of scores without baselines; trend lines."""
        figure = late.figure.Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        codes, title = list[str](), TITLES[self.metric]
        for name in self.models:
            values = self.gains(name) if self.baselines else self.scores(name)
            codes, heights = list(values), list(values.values())
            (line,) = axes.plot(smoothed(heights), label=name)
            axes.plot(heights, ".", markersize=4, color=line.get_color(), alpha=0.4)
        if self.baselines:
            axes.axhline(0, linestyle="--", linewidth=1, color="gray")
        axes.set_xticks(range(len(codes)), codes, rotation=90, size=6)
        axes.set(
            xlabel="languages, from most to fewest training pairs",
            ylabel=f"{title} over the bilingual baseline" if self.baselines else title,
        )
        axes.legend()
        figure.savefig(path, dpi=130)


def smoothed(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """The mean of a window around each value, cut off at the ends; fewer values are left alone."""
    if len(values) < window:
        return list(values)
    before, after = window // 2, window - window // 2
    parts = (values[max(0, i - before) : i + after] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _mean(values: Collection[float], spec: str = ".2f") -> str:
    return table.number(sum(values) / len(values) if values else None, spec)
