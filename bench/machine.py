"""What the machine can do: numpy's matrix-product rate, measured between other work."""

from __future__ import annotations

import time

import numpy as np

_SIZE = 2048


class NumpyRate:
    """Times float32 matrix products; its rate is the machine's limit in this run."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._a = random.standard_normal((_SIZE, _SIZE), np.float32)
        self._b = random.standard_normal((_SIZE, _SIZE), np.float32)
        self._best_secs = float("inf")

    def measure(self) -> None:
        """One product; the best of all counts."""
        began = time.perf_counter()
        _ = self._a @ self._b
        self._best_secs = min(self._best_secs, time.perf_counter() - began)

    @property
    def gflop_per_sec(self) -> float:
        """The best rate so far."""
        return 2 * _SIZE**3 / self._best_secs / 1e9
