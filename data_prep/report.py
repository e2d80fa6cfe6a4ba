"""The report on a prepared folder.

report/report.md    tables of sizes, lengths, cleaning and coverage, by language
report/report.json  the same numbers
report/sizes.png    training pairs by language, from high to low resource, as in section 4.1
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import figure, ticker

from data_prep.encoding import SideStatistics
from lingvo_gshard.core import table
from lingvo_gshard.input import manifest

_TEMPERATURES = (1, 5)
_QUANTILES = {"median": 0.5, "95 %": 0.95, "99 %": 0.99}


@dataclasses.dataclass(frozen=True)
class LanguageReport:
    """A language and the statistics of the two sides of its training text."""

    language: manifest.Language
    source: SideStatistics
    target: SideStatistics


def write(reports: Sequence[LanguageReport], folder: pathlib.Path) -> None:
    """Writes the report's three files."""
    folder.mkdir(parents=True, exist_ok=True)
    largest_first = sorted(
        reports, key=lambda one: (-one.language.num_examples("train"), one.language.code)
    )
    rows = [as_json(one) for one in largest_first]
    (folder / "report.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    (folder / "report.md").write_text(_page(rows))
    _draw(largest_first, folder / "sizes.png")


def as_json(report: LanguageReport) -> dict[str, Any]:
    """Returns the numbers of one language. Lengths in pieces count EOS; the other numbers don't."""
    language = report.language
    return {
        "code": language.code,
        "scripts": list(language.scripts),
        "pairs": {split: language.num_examples(split) for split in manifest.SPLITS},
        "dropped": language.dropped,
        "repaired": language.repaired,
        "source": _side(report.source),
        "target": _side(report.target),
    }


def _side(side: SideStatistics) -> dict[str, float]:
    num_pieces = side.num_pieces - side.num_sentences
    return {
        "tokens": side.num_pieces,
        "mean": round(side.num_pieces / max(side.num_sentences, 1), 2),
        **{name: _quantile(side.lengths, share) for name, share in _QUANTILES.items()},
        "longest": len(side.lengths) - 1,
        "pieces_per_word": round(num_pieces / max(side.num_words, 1), 3),
        "characters_per_piece": round(side.num_characters / max(num_pieces, 1), 3),
        "byte_rate": round(side.num_byte_pieces / max(num_pieces, 1), 6),
        "unknown_rate": round(side.num_unknown / max(num_pieces, 1), 6),
    }


def _quantile(lengths: np.ndarray, share: float) -> int:
    """Returns the shortest length that `share` of the sentences do not exceed."""
    return int(np.searchsorted(np.cumsum(lengths), share * lengths.sum()))


def _page(rows: Sequence[Mapping[str, Any]]) -> str:
    rules = sorted({rule for row in rows for rule in row["dropped"]})
    lengths = ("mean", *_QUANTILES, "longest")
    coverage = ("pieces_per_word", "characters_per_piece", "byte_rate", "unknown_rate")
    sizes: list[Sequence[Any]] = [
        ("language", "scripts", *manifest.SPLITS, "source tokens", "target tokens")
    ]
    dropped: list[Sequence[Any]] = [("language", *rules, "(repaired)")]
    for row in rows:
        tokens = [row[side]["tokens"] for side in ("source", "target")]
        sizes.append((row["code"], " ".join(row["scripts"]), *row["pairs"].values(), *tokens))
        counts = [row["dropped"].get(rule, 0) for rule in rules]
        dropped.append((row["code"], *counts, row["repaired"]))
    sections: dict[str, list[Sequence[Any]]] = {
        "Sizes": sizes,
        "Tokens of a training pair, as the mixture of temperature T draws them": [
            ("T", "source", "target", "target to source: of the rows' lengths, too"),
            *((temperature, *_drawn(rows, temperature)) for temperature in _TEMPERATURES),
        ],
        "Training pairs dropped, by rule": dropped,
        "Lengths in pieces, source": _side_table(rows, "source", lengths),
        "Lengths in pieces, target": _side_table(rows, "target", lengths),
        "Coverage of the source vocabulary": _side_table(rows, "source", coverage),
        "Coverage of the target vocabulary": _side_table(rows, "target", coverage),
    }
    tables = "\n".join(f"## {title}\n\n{table.markdown(rows)}" for title, rows in sections.items())
    return f"# Prepared data\n\n![training pairs by language](sizes.png)\n\n{tables}"


def _drawn(rows: Sequence[Mapping[str, Any]], temperature: float) -> tuple[str, str, str]:
    """Returns both sides' mean tokens, and their ratio, if languages are drawn as n**(1/T)."""
    weights = np.array([row["pairs"]["train"] for row in rows]) ** (1 / temperature)
    source, target = (
        float(weights @ [row[side]["mean"] for row in rows] / weights.sum())
        for side in ("source", "target")
    )
    return f"{source:.2f}", f"{target:.2f}", f"{target / source:.3f}"


def _side_table(
    rows: Sequence[Mapping[str, Any]], side: str, names: Sequence[str]
) -> list[Sequence[Any]]:
    head = ("language", *(name.replace("_", " ") for name in names))
    return [head, *((row["code"], *(row[side][name] for name in names)) for row in rows)]


def _draw(largest_first: Sequence[LanguageReport], path: pathlib.Path) -> None:
    sizes = [one.language.num_examples("train") for one in largest_first]
    picture = figure.Figure(figsize=(max(6.0, 0.16 * len(sizes)), 4), layout="constrained")
    axes = picture.add_subplot()
    axes.bar([one.language.code for one in largest_first], sizes, color="#3b6ea5")
    axes.set_yscale("log")
    # Whole decades, also if the sizes are nearly equal.
    bounds = np.log10([max(min(sizes), 1), max(*sizes, 10)])
    axes.set_ylim(10 ** np.floor(bounds[0]), 10 ** np.ceil(bounds[1]))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("training pairs")
    axes.set_xlabel("language into English, from high to low resource")
    axes.tick_params(axis="x", labelrotation=90, labelsize=7)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    # Without metadata the same data gives the same bytes.
    picture.savefig(path, dpi=120, metadata={"Software": None})
