"""The correlation of languages' loads of experts, within their families and beyond."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np


def rows(loads: Mapping[str, np.ndarray], families: Mapping[str, str]) -> list[list[str]]:
    """Returns a header and a row for each family, the largest first.

    Args:
      loads: the load of each expert by language, float [experts of all layers].
      families: the family of each language.
    """
    members = collections.defaultdict[str, list[int]](list)
    for place, code in enumerate(loads):
        members[families[code]].append(place)
    by_language = np.corrcoef(list(loads.values()))

    codes = list(loads)
    found = [["family", "languages", "within", "with others"]]
    for family, places in sorted(members.items(), key=lambda item: (-len(item[1]), item[0])):
        if len(places) > 1:
            names = " ".join(codes[place] for place in places)
            within, others = _means(by_language, places)
            found.append([family, names, f"{within:.2f}", f"{others:.2f}"])
    return found


def _means(correlations: np.ndarray, places: Sequence[int]) -> tuple[float, float]:
    """Returns the mean correlation within some languages, and the mean with all others."""
    is_own = np.zeros(len(correlations), bool)
    is_own[list(places)] = True
    pairs = np.outer(is_own, is_own) & ~np.eye(len(is_own), dtype=bool)
    others = np.outer(is_own, ~is_own)
    return float(correlations[pairs].mean()), float(correlations[others].mean())
