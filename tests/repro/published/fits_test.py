"""The quality of the factors' predictions of published steps."""

import dataclasses

import numpy as np
import pytest

from repro.published import fits
from tests.repro.published.published_steps import record
from xla_plan.expected import factors

_SHARES = {"a": 0.5, "b": 0.9, "c": 0.8, "d": 0.45, "e": 0.6}


@pytest.fixture
def factor():
    """Returns the factor for five records of a machine, of which a, c and e are fitted."""
    records = [record(name, share) for name, share in reversed(_SHARES.items())]
    return factors.by_machine(records)["v3"]


def test_one_left_out_is_predicted_by_all_others(factor):
    errors = fits.left_out_errors(factor)
    assert sorted(errors) == sorted(_SHARES)
    for name, error in errors.items():
        others = np.array([share for other, share in _SHARES.items() if other != name])
        np.testing.assert_allclose(error, _SHARES[name] / np.exp(np.log(others).mean()) - 1)


def test_records_in_the_band_are_counted(factor):
    # Both held-out records are outside the band, one at each end.
    assert fits.in_band(factor) == 0
    within = dataclasses.replace(factor, held_out=(record("b", 0.5), record("d", 0.79)))
    assert fits.in_band(within) == 2


def test_a_single_record_has_no_error():
    assert fits.left_out_errors(factors.by_machine([record("a", 0.5)])["v3"]) == {}


def test_products_alone_may_be_fitted_in_place_of_bounds():
    products = {"a": 1.0, "b": 2.0, "c": 3.0}
    records = [record(name, 0.9, products_secs=secs) for name, secs in products.items()]
    errors = fits.products_left_out_errors(factors.by_machine(records)["v3"])
    np.testing.assert_allclose(errors["a"], 1.0 / np.sqrt(2.0 * 3.0) - 1)
    np.testing.assert_allclose(errors["b"], 2.0 / np.sqrt(1.0 * 3.0) - 1)


def test_a_whole_project_or_length_may_be_left_out():
    other = {"source": "others/lm"}
    records = [record("a", 0.5), record("b", 0.5, row_tokens=2048), record("c", 0.8, **other)]
    factor = factors.by_machine(records)["v3"]
    by_project = fits.left_out_errors(factor, lambda each: each.project)
    np.testing.assert_allclose([by_project[name] for name in "abc"], [-0.375, -0.375, 0.6])
    by_length = fits.left_out_errors(factor, lambda each: each.row_tokens)
    mean = np.sqrt(0.5 * 0.8)
    np.testing.assert_allclose(
        [by_length[name] for name in "abc"], [0.0, 0.5 / mean - 1, 0.6], atol=1e-9
    )
    one = factors.by_machine([record("a", 0.5), record("b", 0.5)])["v3"]
    assert fits.left_out_errors(one, lambda each: each.project) == {}


def _rows(text):
    """Returns the cells of each table's rows, by the first cell, in the order of the tables."""
    tables = []
    for line in text.splitlines():
        if line.startswith("| ---"):
            tables.append([])
        elif line.startswith("| ") and tables:
            tables[-1].append(line.strip("| ").split(" | "))
    return tables


def test_the_fits_of_all_machines():
    shares = {"a": 0.5, "b": 0.9, "c": 0.8, "d": 0.6, "e": 0.6, "f": 0.7, "g": 1.25}
    records = [record(name, share) for name, share in shares.items()]
    text = fits.text(factors.by_machine([*records, record("h", 0.4, "h100")]))
    rates, errors, by_length, left_out = _rows(text)

    # The shares a, c, e and g have the geometric mean 0.74.
    alike = "0.74 (0.62 to 0.84)"
    assert rates[:2] == [["h100", "-", "0.40", "0.40"], ["v3", "-", alike, alike]]
    assert errors[0] == ["h100", "1", "0", "-", "-", "-", "-", "-", "0 of 0"]
    assert errors[1] == ["v3", "4", "3", "0.59 to 1.48", "26%", "+69%", "19%", "+22%", "3 of 3"]
    assert by_length[1] == ["v3", "to 1024", "4", "26%", "+69%", "3", "19%", "+22%"]
    assert left_out[0] == ["h100", *"--------"]
    assert left_out[1][3:7] == list("----")  # All steps are of one project and of one length.
    first, second = [line for line in text.splitlines() if line.startswith("- ")]
    assert first == "- h100: 1 of somebody/lm"
    assert second == (
        "- v3: 7 of somebody/lm; 3 of 3 held out are within 25%; faster than their bounds: g"
    )


def test_records_beyond_the_aim_are_named_from_the_worst_on():
    shares = {"a": 0.5, "b": 0.7, "c": 0.5, "d": 0.35, "e": 0.5, "f": 1.0}
    records = [record(name, share) for name, share in shares.items()]
    text = fits.text(factors.by_machine(records))
    assert text.endswith("0 of 3 held out are within 25%; beyond: f +100.0%, b +40.0%, d -30.0%")
