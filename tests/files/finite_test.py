"""Weights that are not finite: how they are counted, and the messages about them."""

import ml_dtypes
import numpy as np
import pytest

from lingvo_gshard.files import finite


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
def test_nan_and_both_infinities_count(dtype):
    values = np.array([[0.0, np.nan, 1.5], [np.inf, -np.inf, -2.0]], dtype)
    assert finite.num_not_finite(values) == 3
    assert finite.num_not_finite(values[:, :1]) == 1
    assert finite.num_not_finite(np.zeros((0, 2), dtype)) == 0


def test_all_parts_of_a_large_array_count(monkeypatch):
    monkeypatch.setattr(finite, "_NUMBERS_AT_ONCE", 7)
    values = np.ones((5, 6), np.float32)
    values[[0, 2, 4], [0, 3, 5]] = np.inf
    assert finite.num_not_finite(values) == finite.num_not_finite(values.T) == 3


def test_the_largest_numbers_and_integers_are_finite():
    for dtype in ("float32", "bfloat16"):
        assert finite.num_not_finite(np.array([ml_dtypes.finfo(dtype).max], dtype)) == 0
    assert finite.num_not_finite(np.array([127, -128], np.int8)) == 0


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"a": 0, "b": 1}, r"^RUN: b has 1 number that is not finite \(NaN or infinite\)\.$"),
        ({"a": 7, "b": 1}, r"^RUN: a has 7 numbers that are .*, and another weight has such"),
        ({"a": 7, "b": 0, "c": 1, "d": 2}, "^RUN: a has 7 .*, and 2 other weights have such numb"),
    ],
)
def test_the_first_weight_is_named(counts, message):
    with pytest.raises(ValueError, match=message):
        finite.check("RUN", counts)
