"""How alike the languages of a family use a run's experts.

    gshard train --mode=eval --logdir=RUN      # writes the load of each expert by language
    python -m repro.quality.family_load --logdir=RUN

For each family with two languages or more: the mean correlation of two of its languages' loads, and
of one of its languages with one of another family. A language's load is a vector of all experts in
all layers of a stack. The families are in repro/recipes/m4bible.tsv.
"""

import collections
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.runs import expert_load
from lingvo_gshard.train.metrics_files import EVAL_METRICS, read_lines
from repro.recipes import m4bible_languages
from xla_spmd.files import table

_LOGDIR = flags.DEFINE_string("logdir", None, "The run.", required=True)
_STACK = flags.DEFINE_enum("stack", "encoder", ["encoder", "decoder"], "The stack.")


def main() -> None:
    families = {language.code: language.family for language in m4bible_languages.load()}
    path = pathlib.Path(_LOGDIR.value, EVAL_METRICS)
    evaluations = list(read_lines(path))
    codes = expert_load.evaluated_languages(evaluations)
    unknown = [code for code in codes if code not in families]
    if unknown:
        raise ValueError(f"{path}: the families of {', '.join(unknown)} are unknown.")

    layers = expert_load.by_language(evaluations, codes)
    own = [loads for layer, loads in layers.items() if layer.startswith(_STACK.value)]
    if not own:
        raise ValueError(f"{path}: no language has loads of the {_STACK.value}.")
    loads = {code: np.concatenate([loads[code] for loads in own]) for code in codes}
    print(table.markdown(rows(loads, families)))


def rows(loads: Mapping[str, np.ndarray], families: Mapping[str, str]) -> list[list[str]]:
    """Returns a header and a row for each family, the largest first.

    Args:
      loads: the load of each expert by language, float [experts of all layers].
      families: the family of each language.
    """
    members = collections.defaultdict[str, list[int]](list)
    for place, code in enumerate(loads):
        members[families[code]].append(place)
    correlations = np.corrcoef(list(loads.values()))

    codes = list(loads)
    found = [["family", "languages", "within", "with others"]]
    for family, places in sorted(members.items(), key=lambda item: (-len(item[1]), item[0])):
        if len(places) > 1:
            names = " ".join(codes[place] for place in places)
            within, others = _means(correlations, places)
            found.append([family, names, f"{within:.2f}", f"{others:.2f}"])
    return found


def _means(correlations: np.ndarray, places: Sequence[int]) -> tuple[float, float]:
    """Returns the mean correlation within some languages, and the mean with all others."""
    is_own = np.zeros(len(correlations), bool)
    is_own[list(places)] = True
    pairs = np.outer(is_own, is_own) & ~np.eye(len(is_own), dtype=bool)
    others = np.outer(is_own, ~is_own)
    return float(correlations[pairs].mean()), float(correlations[others].mean())


if __name__ == "__main__":
    cli.run("family_load", main)
