"""Each program of the benchmark computes its collective, compared with NumPy."""

import jax
import numpy as np
import pytest

from bench import collectives

_N = 12  # Numbers on each of two devices.


def _expected(kind, first, second):
    """Returns each device's expected numbers afterwards, from the numbers of both before."""
    match kind:
        case "all-reduce":
            return [first + second, first + second]
        case "all-to-all":
            return [np.append(first[:6], second[:6]), np.append(first[6:], second[6:])]
        case "all-gather":
            return [np.append(first, second), np.append(first, second)]
        case "collective-permute":
            return [second, first]
        case "reduce-scatter":
            return [(first + second)[:6], (first + second)[6:]]


@pytest.mark.parametrize("kind", collectives.BODIES)
def test_a_program_is_one_collective(kind):
    prepared = collectives.prepare(kind, jax.devices()[:2], 4 * _N)
    assert prepared.collective.kind == kind and prepared.collective.times == 1
    if kind == "collective-permute":
        assert prepared.collective.groups == ((0, 1), (1, 0))
    else:
        assert prepared.collective.groups == ((0, 1),)

    x = np.arange(2 * _N, dtype=np.float32)
    np.testing.assert_array_equal(prepared.x, x)
    expected = _expected(kind, x[:_N], x[_N:])
    np.testing.assert_array_equal(prepared.compiled(prepared.x), np.concatenate(expected))
    assert prepared.collective.result_bytes == 4 * len(expected[0])
    assert collectives.median_secs(prepared, 2) > 0


def test_an_unknown_collective_is_refused(monkeypatch):
    monkeypatch.setitem(collectives.BODIES, "all-reduce", lambda x: 2 * x)
    with pytest.raises(AssertionError, match="all-reduce"):
        collectives.prepare("all-reduce", jax.devices()[:2], 4 * _N)


def test_the_numbers_of_devices():
    assert collectives.counts(2) == [2]
    assert collectives.counts(8) == [2, 4, 8]
    assert collectives.counts(6) == [2, 4, 6]
