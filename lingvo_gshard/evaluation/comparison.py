"""Figure 6: the gain of multilingual models over bilingual baselines, language by language."""

import dataclasses
import os
import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from lingvo_gshard.core.late import figure as mpl_figure
from lingvo_gshard.evaluation.quality import TITLES, Quality
from xla_spmd.files import table

# The trend lines are means over this many languages, as in the paper.
_WINDOW = 10
# Below this many languages, a half could be a single language.
_FEWEST_OF_HALVES = 4


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A metric of several models by name, and the bilingual baselines' metric by language.

    A model has one or more runs, whose scores are averaged. Raises ValueError unless all runs have
    the same languages, with the same training pairs and the same tokens, and these include the
    baselines' languages.
    """

    models: Mapping[str, Sequence[Quality]]
    baselines: Mapping[str, float]
    metric: str = "bleu"

    def __post_init__(self) -> None:
        first_name = next(iter(self.models))
        first_run = self.models[first_name][0]
        expected = _train_pairs(first_run)

        for name, runs in self.models.items():
            for run in runs:
                # Items are (language, pairs), so a language with other pairs differs, too.
                differing = {code for code, _ in _train_pairs(run).items() ^ expected.items()}
                if differing:
                    raise ValueError(
                        f"Comparison: the first run of {first_name} and a run of {name} differ in "
                        f"languages or their training pairs: {', '.join(sorted(differing))}."
                    )

                check_same_tokens(self.metric, first_run, run, f"a run of {name}")

        unknown = self.baselines.keys() - expected.keys()
        if unknown:
            codes = ", ".join(sorted(unknown))
            raise ValueError(
                f"Comparison: there are baselines for {codes}, which {first_name} lacks."
            )

    def scores(self, model: str) -> dict[str, float]:
        """Returns the mean metric of a model's runs by language, most training pairs first."""
        runs = [quality.values(self.metric) for quality in self.models[model]]
        means = {}
        for code in runs[0]:
            means[code] = statistics.fmean(run[code] for run in runs)
        return means

    def gains(self, model: str) -> dict[str, float]:
        """Returns the metric minus the baseline's by language, most training pairs first."""
        return {
            code: score - self.baselines[code]
            for code, score in self.scores(model).items()
            if code in self.baselines
        }

    def table(self) -> str:
        """Returns a table of training pairs, baselines, and each model's score and gain.

        The rows are the languages, most training pairs first, and averages. With four or more
        languages, the larger and the smaller half by training pairs are averaged, too, as the paper
        looks at high- and low-resource languages separately. Languages with different tokens have
        `-` as their average. sacreBLEU's signatures follow the table.
        """
        header = ["language", "train pairs", "baseline"]
        for name in self.models:
            header += [name, "gain"]

        first_model = next(iter(self.models.values()))
        pairs = {language.code: language.train_pairs for language in first_model[0].by_size()}
        rows = []
        for code, train_pairs in pairs.items():
            rows.append([code, str(train_pairs), *self._columns([code])])

        # The middle language of an odd number counts with the larger half.
        codes = list(pairs)
        rows.append(["average", "", *self._columns(codes)])
        if len(codes) >= _FEWEST_OF_HALVES:
            half = -(-len(codes) // 2)
            rows.append(["larger half", "", *self._columns(codes[:half])])
            rows.append(["smaller half", "", *self._columns(codes[half:])])

        # Several signatures without languages are a warning: different versions scored the runs.
        signatures: set[str] = set()
        for runs in self.models.values():
            for run in runs:
                signatures.update(run.signatures(self.metric))

        return "\n".join([table.text([header, *rows]), *sorted(signatures)])

    def _columns(self, codes: Sequence[str]) -> list[str]:
        """Returns the averages over some languages: the baseline, and each model's score and gain.

        Languages without a baseline count only in the models' scores. All columns are `-` if the
        languages' tokens differ.
        """
        if not self._are_alike(codes):
            return ["-"] * (1 + 2 * len(self.models))

        columns = [_average([self.baselines[code] for code in codes if code in self.baselines])]
        for name in self.models:
            scores = self.scores(name)
            gains = self.gains(name)
            columns.append(_average([scores[code] for code in codes]))
            columns.append(_average([gains[code] for code in codes if code in gains], "+.2f"))
        return columns

    def _are_alike(self, codes: Collection[str]) -> bool:
        """Returns whether some languages are scored by the same tokens, so means make sense."""
        first_run = next(iter(self.models.values()))[0]
        tokens = first_run.tokens(self.metric)
        return len({tokens[code] for code in codes}) <= 1

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG of Figure 6: the gains by language, and their trend lines.

        Without baselines it shows the scores. Trends need languages with equal tokens.
        """
        figure = mpl_figure.Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()

        # Languages are dots in the color of their model's trend line.
        codes: list[str] = []
        for name in self.models:
            values = self.gains(name) if self.baselines else self.scores(name)
            codes = list(values)
            heights = list(values.values())
            (dots,) = axes.plot(heights, ".", markersize=4, alpha=0.4)
            if self._are_alike(codes):
                axes.plot(smoothed(heights), label=name, color=dots.get_color())
            else:
                dots.set_label(name)

        metric = TITLES[self.metric]
        # The dashed line at 0 stands for the baselines, as in the paper.
        if self.baselines:
            axes.axhline(0, linestyle="--", linewidth=1, color="gray")
            axes.set_ylabel(f"{metric} over the bilingual baseline")
        else:
            axes.set_ylabel(metric)

        axes.set_xticks(range(len(codes)), codes, rotation=90, size=7)
        axes.set_xlabel("languages, from most to fewest training pairs")
        for text in axes.legend().get_texts():
            text.set_parse_math(False)  # A name may contain a $.
        figure.savefig(path, dpi=130)


def smoothed(values: Sequence[float], window: int = _WINDOW) -> list[float]:
    """Returns the mean of a window around each value; windows are cut off at the ends.

    Fewer values than a window are returned unchanged.
    """
    if len(values) < window:
        return list(values)

    ones = np.ones(window)
    sums = np.convolve(values, ones, "same")
    counts = np.convolve(np.ones(len(values)), ones, "same")
    return (sums / counts).tolist()


def check_same_tokens(metric: str, first: Quality, other: Quality, name: str) -> None:
    """Raises ValueError if the runs scored a language with different tokenizers."""
    expected = first.tokens(metric)
    for code, tokens in other.tokens(metric).items():
        if tokens != expected.get(code, tokens):
            raise ValueError(
                f"{name} has the {TITLES[metric]} of {code} by the tokens {tokens}, and another "
                f"run by {expected[code]}; these are not comparable: decode both again."
            )


def _train_pairs(quality: Quality) -> dict[str, int]:
    """Returns the number of training pairs by language."""
    return {language.code: language.train_pairs for language in quality.languages}


def _average(values: Collection[float], spec: str = ".2f") -> str:
    """Returns the mean of values as text, or `-` without values."""
    return table.number(statistics.fmean(values) if values else None, spec)
