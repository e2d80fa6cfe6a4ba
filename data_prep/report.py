"""The report on a prepared folder.

report/report.md    tables of sizes, lengths, cleaning and coverage, by language
report/report.json  the same numbers
report/sizes.png    training pairs by language, from high to low resource, as in section 4.1

For documents, these are numbers of documents by corpus.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from data_prep.encoding import Encoded, SideStatistics
from data_prep.rules import Rule
from lingvo_gshard.input import manifest
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import table

_QUANTILES = {"median": 0.5, "95 %": 0.95, "99 %": 0.99}
_SIDES = {Kind.PARALLEL: ("source", "target"), Kind.TEXT: ("text",)}
# The columns of the tables of lengths and of coverage.
_LENGTHS = ("mean", *_QUANTILES, "longest")
_COVERAGE = ("pieces_per_word", "characters_per_piece", "byte_rate", "unknown_rate")
# The report counts the pairs that are too long for rows of these lengths.
_ROW_LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
_MANY_DAMAGED = 0.01
# By the name of a count in the manifest: the fault of its examples, and the remedy.
_DAMAGE = {
    "escaped": "have HTML entities, such as &apos;, or marks of a tokenizer, such as @-@, and are "
    "learned with them: unescape = true replaces them by text",
    "mojibake": "seem to have been decoded with the encoding of another text, and are learned like "
    "that: convert the files to UTF-8 from their true encoding",
}
_MANY_DROPPED = 0.03  # The share of a language's examples that one rule dropped.
# The user's setting if a rule drops too much.
_SETTING_OF_RULE = {
    Rule.UNKNOWN_LANGUAGE: 'language_codes = "source" accepts any names',
    Rule.MALFORMED: "the log names the first of them",
    Rule.LOW_SCORE: "min_score decides",
    Rule.TOO_LONG: "max_chars decides",
    Rule.RATIO: "max_length_ratio decides",
    Rule.WRONG_SCRIPT: "[scripts] sets a language's scripts in place of the survey",
    Rule.WRONG_LANGUAGE: "check_language = false keeps them",
    Rule.TOO_MANY_PIECES: "max_pieces decides",
}
_Row = Mapping[str, Any]  # An entry of report.json.


def write(
    reports: Iterable[tuple[manifest.Language, Encoded]],
    folder: pathlib.Path,
    kind: Kind = Kind.PARALLEL,
) -> None:
    """Writes the report's three files, from languages and their encoded training text."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_numbers(language, train, kind) for language, train in reports]
    # From high to low resource, as in the paper's figures.
    rows.sort(key=lambda row: (-row[_plural(kind)]["train"], row["code"]))

    text = json.dumps(rows, indent=1, ensure_ascii=False) + "\n"
    (folder / "report.json").write_text(text, encoding="utf-8")
    (folder / "report.md").write_text(_page(rows, kind), encoding="utf-8")
    _draw_sizes(rows, kind, folder / "sizes.png")


def warnings(data: manifest.Manifest) -> list[str]:
    """Returns a line for each problem with much of a language's text."""
    return [*many_dropped(data), *many_damaged(data)]


def many_dropped(data: manifest.Manifest) -> list[str]:
    """Returns a warning for each rule that dropped more than a few percent of a language."""
    lines: list[str] = []
    for language in data.languages:
        for name, number in language.dropped.items():
            share = number / max(language.read, 1)
            if share <= _MANY_DROPPED:
                continue

            warning = (
                f"{language.code}: the rule {name} dropped {100 * share:.1f} % of the examples "
                f"read, {number} of {language.read}"
            )
            advice = _SETTING_OF_RULE.get(Rule(name))
            lines.append(f"{warning}: {advice}" if advice else warning)
    return lines


def many_damaged(data: manifest.Manifest) -> list[str]:
    """Returns a warning for each language with many examples of a kind of _DAMAGE."""
    lines: list[str] = []
    for kind, description in _DAMAGE.items():
        for language in data.languages:
            share = getattr(language, kind) / max(language.read, 1)
            if share > _MANY_DAMAGED:
                lines.append(
                    f"{language.code}: {100 * share:.1f} % of the examples read {description}"
                )
    return lines


def _plural(kind: Kind) -> str:
    return f"{kind.noun}s"


def _numbers(language: manifest.Language, train: Encoded, kind: Kind) -> dict[str, Any]:
    """Returns a language's entry of report.json."""
    numbers: dict[str, Any] = {
        "code": language.code,
        "scripts": list(language.scripts),
        _plural(kind): {split: language.num_examples(split) for split in manifest.SPLITS},
        "read": language.read,
        "kept": language.kept,
        "dropped": language.dropped,
        "repaired": language.repaired,
        "escaped": language.escaped,
        "mojibake": language.mojibake,
    }
    if kind is Kind.PARALLEL:
        numbers["longer_than_rows"] = _shares_longer(train.longer_sides)

    # A document is a target without a source.
    sides = (train.source, train.target)[-len(_SIDES[kind]) :]
    for name, side in zip(_SIDES[kind], sides, strict=True):
        numbers[name] = _side_numbers(side)
    return numbers


def _shares_longer(longer_sides: Mapping[int, int]) -> dict[str, float]:
    """Returns the share of pairs with a side that is too long, for each of _ROW_LENGTHS.

    `longer_sides` has the numbers of pairs by the length of their longer side.
    """
    num_pairs = sum(longer_sides.values())
    shares: dict[str, float] = {}
    for row_length in _ROW_LENGTHS:
        num_longer = sum(n for length, n in longer_sides.items() if length > row_length)
        shares[str(row_length)] = round(num_longer / max(num_pairs, 1), 6)
    return shares


def _side_numbers(side: SideStatistics) -> dict[str, float]:
    """Returns the numbers of one side. Lengths in pieces include EOS; the other numbers don't."""
    # Each sentence has one EOS.
    num_sentences = side.lengths.total()
    num_pieces = side.num_pieces - num_sentences

    # A quantile is the smallest length that at least this share of the sentences do not exceed.
    lengths = sorted(side.lengths)
    num_up_to = np.cumsum([side.lengths[length] for length in lengths])
    quantiles: dict[str, float] = dict.fromkeys(_QUANTILES, 0)
    if lengths:
        for name, share in _QUANTILES.items():
            quantiles[name] = lengths[np.searchsorted(num_up_to, share * num_sentences)]

    return {
        "tokens": side.num_pieces,
        "mean": round(side.num_pieces / max(num_sentences, 1), 2),
        **quantiles,
        "longest": max(lengths, default=0),
        "pieces_per_word": round(num_pieces / max(side.num_words, 1), 3),
        "characters_per_piece": round(side.num_characters / max(num_pieces, 1), 3),
        "byte_rate": round(side.num_byte_pieces / max(num_pieces, 1), 6),
        "unknown_rate": round(side.num_unknown / max(num_pieces, 1), 6),
    }


def _page(rows: Sequence[_Row], kind: Kind) -> str:
    """Returns report.md, from the languages' entries of report.json in order."""
    sides = _SIDES[kind]

    def sizes(row: _Row) -> dict[str, Any]:
        tokens = {f"{side} tokens": row[side]["tokens"] for side in sides}
        return {"scripts": " ".join(row["scripts"]), **row[_plural(kind)], **tokens}

    sections = {"Sizes": _table(rows, kind, sizes)}
    if kind is Kind.PARALLEL:
        title = "Tokens of a training pair, as the mixture of temperature T draws them"
        sections[title] = table.markdown(
            [
                ("T", *sides, "target to source: a good ratio for the rows' lengths, too"),
                _tokens_of_drawn_pair(rows, temperature=1),
                _tokens_of_drawn_pair(rows, temperature=5),
            ]
        )
        title = "Training pairs that are too long for rows with this many tokens a side, in percent"
        sections[title] = _table_of_longer(rows, kind)
    sections[f"Every {kind.noun} that was read"] = _table(rows, kind, _accounts)
    sections[f"{_plural(kind).capitalize()} dropped, by rule"] = _table_of_drops(rows, kind)
    for side in sides:
        sections[f"Lengths in pieces, {side}"] = _table_of_side(rows, kind, side, _LENGTHS)
    for side in sides:
        sections[f"Coverage of the {side} vocabulary"] = _table_of_side(rows, kind, side, _COVERAGE)

    text = "\n".join(f"## {title}\n\n{section}" for title, section in sections.items())
    sizes_picture = f"![training {_plural(kind)} by {kind.group}](sizes.png)"
    return f"# Prepared data\n\n{sizes_picture}\n\n{text}"


def _table(rows: Sequence[_Row], kind: Kind, columns: Callable[[_Row], Mapping[str, Any]]) -> str:
    """Returns a table with a line per language; `columns` returns its cells by their headers."""
    lines = [{kind.group: row["code"], **columns(row)} for row in rows]
    header = list(lines[0])
    return table.markdown([header, *(list(line.values()) for line in lines)])


def _accounts(row: _Row) -> dict[str, Any]:
    """Returns the account of a language: examples read = kept + dropped."""
    num_dropped = sum(row["dropped"].values())
    share = num_dropped / max(row["read"], 1)
    return {
        "read": row["read"],
        "kept": row["kept"],
        "dropped": num_dropped,
        "dropped, %": f"{100 * share:.1f}",
    }


def _table_of_longer(rows: Sequence[_Row], kind: Kind) -> str:
    # Columns without any such pairs are left out; all columns after them are 0, too.
    is_needed: dict[str, bool] = {}
    for length in map(str, _ROW_LENGTHS):
        is_needed[length] = any(row["longer_than_rows"][length] for row in rows)
    lengths = [length for length, needed in is_needed.items() if needed] or ["16"]

    def shares(row: _Row) -> dict[str, str]:
        return {length: f"{100 * row['longer_than_rows'][length]:.1f}" for length in lengths}

    return _table(rows, kind, shares)


def _table_of_drops(rows: Sequence[_Row], kind: Kind) -> str:
    # A rule gets a column if it dropped examples of any language.
    rules: set[str] = set()
    for row in rows:
        rules |= row["dropped"].keys()
    no_drops = dict.fromkeys(sorted(rules), 0)

    def drops(row: _Row) -> dict[str, int]:
        return (
            no_drops
            | row["dropped"]
            | {
                "(repaired)": row["repaired"],
                "(mojibake)": row["mojibake"],
            }
        )

    return _table(rows, kind, drops)


def _table_of_side(rows: Sequence[_Row], kind: Kind, side: str, names: Sequence[str]) -> str:
    def numbers(row: _Row) -> dict[str, float]:
        return {name.replace("_", " "): row[side][name] for name in names}

    return _table(rows, kind, numbers)


def _tokens_of_drawn_pair(rows: Sequence[_Row], temperature: int) -> tuple[str, str, str, str]:
    """Returns T, both sides' mean tokens, and their ratio, when drawing languages by n**(1/T)."""
    # The mixture draws language l in proportion to n_l**(1/T): see input/mixture.py.
    weights = np.array([row["pairs"]["train"] for row in rows]) ** (1 / temperature)
    source_means = [row["source"]["mean"] for row in rows]
    target_means = [row["target"]["mean"] for row in rows]
    source = float(weights @ source_means / weights.sum())
    target = float(weights @ target_means / weights.sum())
    return f"{temperature}", f"{source:.2f}", f"{target:.2f}", f"{target / source:.3f}"


def _draw_sizes(rows: Sequence[_Row], kind: Kind, path: pathlib.Path) -> None:
    """Draws the numbers of training examples as bars, on a logarithmic axis."""
    # Imported here: it takes half a second, and a user's mistake should be reported before that.
    from matplotlib.figure import Figure

    sizes = [row[_plural(kind)]["train"] for row in rows]
    picture = Figure(figsize=(max(6.0, 0.16 * len(sizes)), 4), layout="constrained")
    axes = picture.add_subplot()
    axes.bar([row["code"] for row in rows], sizes, color="#3b6ea5")

    # Whole decades, even if the sizes are nearly equal.
    low = np.log10(max(min(sizes), 1))
    high = np.log10(max(*sizes, 10))
    axes.set(yscale="log", ylim=(10 ** np.floor(low), 10 ** np.ceil(high)))
    axes.yaxis.set_major_formatter("{x:,.0f}")

    groups = "direction" if kind is Kind.PARALLEL else kind.group
    axes.set(xlabel=f"{groups}, from high to low resource", ylabel=f"training {_plural(kind)}")
    axes.tick_params(axis="x", labelrotation=90, labelsize=7)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)

    # Without metadata the same data gives the same bytes.
    picture.savefig(path, dpi=120, metadata={"Software": None})
