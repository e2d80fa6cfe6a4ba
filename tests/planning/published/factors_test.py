"""Factors from bounds to expected times, against NumPy on records made by hand."""

import dataclasses
import json

import numpy as np
import pytest

from lingvo_gshard.planning.estimate import hardware
from lingvo_gshard.planning.published import factors
from tests.planning import published_steps
from tests.planning.published_steps import record

_SHARES = {"a": 0.5, "b": 0.9, "c": 0.8, "d": 0.45, "e": 0.6}


@pytest.fixture
def factor():
    """That of five records of a machine, of which a, c and e are fitted."""
    records = [record(name, share) for name, share in reversed(_SHARES.items())]
    return factors.by_machine(records)["v3"]


def test_every_other_record_is_fitted_by_name(factor):
    assert [each.id for each in factor.fitted] == ["a", "c", "e"]
    assert [each.id for each in factor.held_out] == ["b", "d"]


def test_each_project_on_each_machine_is_halved_by_itself():
    other = {"source": "others/lm"}
    records = [record(name, 0.5) for name in ("a1", "a2", "a3")]
    records += [record(name, 0.5, **other) for name in ("b1", "b2")]
    records += [record("c1", 0.5, "h100"), record("c2", 0.5, "h100", **other)]
    found = factors.by_machine(records)
    assert list(found) == ["h100", "v3"]
    assert [each.id for each in found["v3"].fitted] == ["b1", "a1", "a3"]
    assert [each.id for each in found["v3"].held_out] == ["b2", "a2"]
    assert found["v3"].projects == ("others/lm", "somebody/lm")
    assert [each.id for each in found["h100"].fitted] == ["c2", "c1"]
    assert found["h100"].held_out == ()


def test_the_factor_is_the_best_constant_of_the_logarithms(factor):
    bounds = np.array([each.bound_secs for each in factor.fitted])
    measured = np.array([each.measured_secs for each in factor.fitted])

    # Least squares of log(measured) = log(bound) - log(factor), in the one unknown.
    solution, *_ = np.linalg.lstsq(np.ones((3, 1)), np.log(measured) - np.log(bounds))
    np.testing.assert_allclose(factor.value, np.exp(-solution[0]))


def test_expected_times_and_their_band(factor):
    expected = factor.expected(2.0)
    np.testing.assert_allclose(expected.secs, 2.0 / np.exp(np.log([0.5, 0.8, 0.6]).mean()))
    assert (expected.least_secs, expected.most_secs) == (2.0 / 0.8, 2.0 / 0.5)
    # Both that are held out lie beyond it, one at each end.
    assert factor.in_band == 0
    within = dataclasses.replace(factor, held_out=(record("b", 0.5), record("d", 0.79)))
    assert within.in_band == 2


def test_errors_are_those_of_expected_over_measured(factor):
    mean = np.exp(np.log([0.5, 0.8, 0.6]).mean())
    for each in (*factor.fitted, *factor.held_out):
        np.testing.assert_allclose(factor.error(each), _SHARES[each.id] / mean - 1)


def test_one_left_out_is_predicted_by_all_others(factor):
    errors = factor.left_out_errors()
    assert sorted(errors) == sorted(_SHARES)
    for name, error in errors.items():
        others = np.array([share for other, share in _SHARES.items() if other != name])
        np.testing.assert_allclose(error, _SHARES[name] / np.exp(np.log(others).mean()) - 1)


def test_products_alone_may_be_fitted_in_place_of_bounds():
    products = {"a": 1.0, "b": 2.0, "c": 3.0}
    records = [record(name, 0.9, products_secs=secs) for name, secs in products.items()]
    errors = factors.by_machine(records)["v3"].products_left_out_errors()
    np.testing.assert_allclose(errors["a"], 1.0 / np.sqrt(2.0 * 3.0) - 1)
    np.testing.assert_allclose(errors["b"], 2.0 / np.sqrt(1.0 * 3.0) - 1)


def test_a_single_record_is_fitted_and_tells_no_error():
    factor = factors.by_machine([record("a", 0.5)])["v3"]
    assert factor.value == factor.lowest == factor.highest == 0.5
    assert factor.held_out == () and factor.left_out_errors() == {}


def test_a_machine_without_records_has_no_factor(monkeypatch, tmp_path):
    path = published_steps.write(tmp_path / "bounds.json", record("a", 0.5))
    monkeypatch.setattr(factors, "BOUNDS", path)
    assert factors.of_topology("v3:8x8").value == 0.5
    assert factors.of_topology("v5e:16x16x4slices") is None


def test_the_records_of_this_package_are_of_known_machines():
    records = factors.read(factors.BOUNDS)
    assert {each.machine for each in records} <= hardware.GENERATIONS.keys()
    lingvo = [each for each in records if each.project == "tensorflow/lingvo"]
    assert len(lingvo) >= 8 and all(0.5 < each.share < 1.0 for each in lingvo)


def _file(path, content):
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[{", "JSONDecodeError"),
        ("{}", "expected a list of records, got dict"),
        ('[{"id": "a"}]', "KeyError"),
        ("[3]", "TypeError"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, content, problem):
    path = _file(tmp_path / "bounds.json", content)
    with pytest.raises(ValueError, match=problem) as error:
        factors.read(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"bound_secs": 0.0}, "a: bound_secs must be above 0, got 0.0"),
        ({"measured_secs": "4"}, "a: measured_secs must be above 0, got '4'"),
        ({"measured_secs": float("nan")}, "a: measured_secs must be above 0, got nan"),
        ({"topology": "v4:2x2"}, "a: v4:2x2 is no topology of v3"),
        ({"id": "b"}, "b is there twice"),
    ],
)
def test_wrong_records_are_named(tmp_path, changes, problem):
    first = dataclasses.replace(record("a", 0.5), **changes)
    path = published_steps.write(tmp_path / "bounds.json", first, record("b", 0.5))
    with pytest.raises(ValueError, match=problem) as error:
        factors.read(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="bounds.json is missing or damaged .FileNotFoundError"):
        factors.read(tmp_path / "bounds.json")


def test_the_json_has_what_the_text_has(factor):
    values = json.loads(json.dumps(factor.as_json(2.0)))
    expected = factor.expected(2.0)
    assert values["step_secs"] == expected.secs and values["factor"] == factor.value
    assert [values["least_step_secs"], values["most_step_secs"]] == [
        expected.least_secs,
        expected.most_secs,
    ]
    assert values["fitted_records"] == ["a", "c", "e"]
    assert values["held_out_records"] == ["b", "d"]
    assert (values["machine"], values["projects"]) == ("v3", ["somebody/lm"])
