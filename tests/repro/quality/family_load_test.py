"""The correlation of related languages' loads."""

import numpy as np

from repro.quality import family_load


def test_correlations_within_families_and_with_others():
    rng = np.random.default_rng(0)
    loads = {code: rng.random(6) for code in ("pl", "cs", "uk", "wo")}
    families = {"pl": "Slavic", "cs": "Slavic", "uk": "Slavic", "wo": "Atlantic-Congo"}

    def correlation(a, b):
        return np.corrcoef(loads[a], loads[b])[0, 1]

    within = np.mean([correlation("pl", "cs"), correlation("pl", "uk"), correlation("cs", "uk")])
    others = np.mean([correlation(code, "wo") for code in ("pl", "cs", "uk")])
    header, *rows = family_load.rows(loads, families)
    assert header == ["family", "languages", "within", "with others"]
    assert rows == [["Slavic", "pl cs uk", f"{within:.2f}", f"{others:.2f}"]]
