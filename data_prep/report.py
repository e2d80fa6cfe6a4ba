"""The report on a prepared folder.

report/report.md    tables of sizes, lengths, cleaning and coverage, by language
report/report.json  the same numbers
report/sizes.png    training pairs by language, from high to low resource, as in section 4.1
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from data_prep.encoding import Encoded, SideStatistics
from lingvo_gshard import cli
from lingvo_gshard.files import table
from lingvo_gshard.input import manifest

_QUANTILES = {"median": 0.5, "95 %": 0.95, "99 %": 0.99}
_SIDES = ("source", "target")
_Row = Mapping[str, Any]


def write(reports: Iterable[tuple[manifest.Language, Encoded]], folder: pathlib.Path) -> None:
    """Writes the report's three files, from languages and what was made of their training text."""
    folder.mkdir(parents=True, exist_ok=True)
    # Lengths in pieces count EOS; the other numbers don't.
    rows: list[dict[str, Any]] = [
        {
            "code": language.code,
            "scripts": list(language.scripts),
            "pairs": {split: language.num_examples(split) for split in manifest.SPLITS},
            "dropped": language.dropped,
            "repaired": language.repaired,
            "source": _side(train.source),
            "target": _side(train.target),
        }
        for language, train in reports
    ]
    rows.sort(key=lambda row: (-row["pairs"]["train"], row["code"]))
    (folder / "report.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    (folder / "report.md").write_text(_page(rows))
    _draw(rows, folder / "sizes.png")


def _side(side: SideStatistics) -> dict[str, float]:
    num_sentences = side.lengths.total()
    num_pieces = side.num_pieces - num_sentences
    lengths = sorted(side.lengths)
    num_shorter = np.cumsum([side.lengths[length] for length in lengths])
    quantiles = {
        name: lengths[np.searchsorted(num_shorter, share * num_sentences)] if lengths else 0
        for name, share in _QUANTILES.items()
    }
    return {
        "tokens": side.num_pieces,
        "mean": round(side.num_pieces / max(num_sentences, 1), 2),
        **quantiles,  # The shortest length that this share of the sentences do not exceed.
        "longest": max(lengths, default=0),
        "pieces_per_word": round(num_pieces / max(side.num_words, 1), 3),
        "characters_per_piece": round(side.num_characters / max(num_pieces, 1), 3),
        "byte_rate": round(side.num_byte_pieces / max(num_pieces, 1), 6),
        "unknown_rate": round(side.num_unknown / max(num_pieces, 1), 6),
    }


def _page(rows: Sequence[_Row]) -> str:
    def by_language(columns: Callable[[_Row], Mapping[str, Any]]) -> str:
        body = [{"language": row["code"], **columns(row)} for row in rows]
        return table.markdown([list(body[0]), *(list(row.values()) for row in body)])

    def of_side(side: str, *names: str) -> str:
        return by_language(lambda row: {name.replace("_", " "): row[side][name] for name in names})

    def sizes(row: _Row) -> dict[str, Any]:
        tokens = {f"{side} tokens": row[side]["tokens"] for side in _SIDES}
        return {"scripts": " ".join(row["scripts"]), **row["pairs"], **tokens}

    rules = sorted({rule for row in rows for rule in row["dropped"]})
    no_drops = dict.fromkeys(rules, 0)
    drawn = [("T", *_SIDES, "target to source: of the rows' lengths, too")]
    lengths = ("mean", *_QUANTILES, "longest")
    coverage = ("pieces_per_word", "characters_per_piece", "byte_rate", "unknown_rate")
    sections = {
        "Sizes": by_language(sizes),
        "Tokens of a training pair, as the mixture of temperature T draws them": table.markdown(
            drawn + [_drawn(rows, temperature) for temperature in (1, 5)]
        ),
        "Pairs dropped, by rule": by_language(
            lambda row: no_drops | row["dropped"] | {"(repaired)": row["repaired"]}
        ),
        **{f"Lengths in pieces, {side}": of_side(side, *lengths) for side in _SIDES},
        **{f"Coverage of the {side} vocabulary": of_side(side, *coverage) for side in _SIDES},
    }
    tables = "\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"# Prepared data\n\n![training pairs by language](sizes.png)\n\n{tables}"


def _drawn(rows: Sequence[_Row], temperature: int) -> tuple[str, str, str, str]:
    """Returns T, both sides' mean tokens, and their ratio, if languages are drawn as n**(1/T)."""
    weights = np.array([row["pairs"]["train"] for row in rows]) ** (1 / temperature)
    source, target = (
        float(weights @ [row[side]["mean"] for row in rows] / weights.sum()) for side in _SIDES
    )
    return f"{temperature}", f"{source:.2f}", f"{target:.2f}", f"{target / source:.3f}"


def _draw(rows: Sequence[_Row], path: pathlib.Path) -> None:
    sizes = [row["pairs"]["train"] for row in rows]
    picture = cli.load("matplotlib.figure").Figure(
        figsize=(max(6.0, 0.16 * len(sizes)), 4), layout="constrained"
    )
    axes = picture.add_subplot()
    axes.bar([row["code"] for row in rows], sizes, color="#3b6ea5")
    # Whole decades, also if the sizes are nearly equal.
    low, high = np.log10([max(min(sizes), 1), max(*sizes, 10)])
    axes.set(yscale="log", ylim=(10 ** np.floor(low), 10 ** np.ceil(high)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="direction, from high to low resource", ylabel="training pairs")
    axes.tick_params(axis="x", labelrotation=90, labelsize=7)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    # Without metadata the same data gives the same bytes.
    picture.savefig(path, dpi=120, metadata={"Software": None})
