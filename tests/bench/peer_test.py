"""The inputs of the benchmarks' peers."""

import numpy as np
import pytest

from bench import peer


@pytest.mark.slow
def test_sinusoids_equal_float64():
    # A geometric series of wavelengths, from 2 pi to 20000 pi.
    rates = 1e4 ** -np.linspace(0, 1, 4)
    angles = np.arange(129)[:, None] * rates
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    actual = peer.sinusoids(129, 8)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=2e-5)  # The precision of float32 angles.
