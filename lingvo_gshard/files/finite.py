"""Weights that are not finite: they are counted where they are read, and refused by name."""

from collections.abc import Mapping

import numpy as np

# So that the answers for large weights take little memory.
_NUMBERS_AT_ONCE = 2**20


def num_not_finite(values: np.ndarray) -> int:
    """Returns how many of some numbers are NaN or infinite; integers never are."""
    flat = values.reshape(-1)
    count = 0
    for start in range(0, flat.size, _NUMBERS_AT_ONCE):
        part = flat[start : start + _NUMBERS_AT_ONCE]
        count += part.size - int(np.count_nonzero(np.isfinite(part)))
    return count


def check(source: str, counts: Mapping[str, int]) -> None:
    """Raises ValueError if any of the weights of `source` has numbers that are not finite.

    `counts` are the numbers of these elements by weight. The error names the first weight.
    """
    bad = [name for name, count in counts.items() if count > 0]
    if not bad:
        return

    first = bad[0]
    numbers = "number that is" if counts[first] == 1 else "numbers that are"
    problem = f"{source}: {first} has {counts[first]} {numbers} not finite (NaN or infinite)"
    if len(bad) == 1:
        raise ValueError(f"{problem}.")
    others = "another weight has" if len(bad) == 2 else f"{len(bad) - 1} other weights have"
    raise ValueError(f"{problem}, and {others} such numbers.")
