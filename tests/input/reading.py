"""Batches of an input, and their comparison."""

import numpy as np


def take(source, count):
    """Returns the next batches of an input."""
    return [next(source) for _ in range(count)]


def assert_equal(one, other):
    """Asserts that two batches have the same arrays under the same names."""
    for (name, a), (expected, b) in zip(one.FlattenItems(), other.FlattenItems(), strict=True):
        assert name == expected
        np.testing.assert_array_equal(a, b, err_msg=name)
