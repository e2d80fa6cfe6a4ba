"""Factors from bounds to expected times, against NumPy on records made by hand."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import optimize

from tests.repro.published import published_steps
from tests.repro.published.published_steps import record
from xla_plan.expected import factors
from xla_plan.machines import hardware

_SHARES = {"a": 0.5, "b": 0.9, "c": 0.8, "d": 0.45, "e": 0.6}


@pytest.fixture
def factor():
    """The factor of five records of a machine; a, c and e are fitted."""
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


def test_errors_are_those_of_expected_over_measured(factor):
    mean = np.exp(np.log([0.5, 0.8, 0.6]).mean())
    for each in (*factor.fitted, *factor.held_out):
        np.testing.assert_allclose(factor.error(each), _SHARES[each.id] / mean - 1)


def _of_parts(attention, products, others, measured):
    """Returns a factor that is fitted to steps with these seconds of each kind of work."""
    records = []
    for number, parts in enumerate(zip(attention, products, others, measured, strict=True)):
        attend, multiply, rest, secs = map(float, parts)
        fields = {
            "bound_secs": attend + multiply + rest,
            "attention_secs": attend,
            "products_secs": attend + multiply,
            "measured_secs": secs,
        }
        records.append(record(f"r{number}", 0.5, **fields))
    return dataclasses.replace(factors.by_machine(records)["v3"], fitted=tuple(records))


def test_each_kind_of_work_has_a_rate():
    """Steps that are made of three rates, with noise, against least squares by SciPy."""
    rng = np.random.default_rng(0)
    attention = np.array([0.02, 0.5, 0.04, 0.1, 0.3, 1.2])
    products = np.array([2.0, 1.0, 0.9, 2.5, 2.0, 1.8])
    others = np.array([1.0, 0.5, 1.1, 1.5, 0.5, 0.2])
    secs = attention / 0.2 + products / 0.6 + others / 0.9
    measured = secs * np.exp(0.05 * rng.normal(size=6))
    factor = _of_parts(attention, products, others, measured)

    def errors(logs):
        attend, multiply, rest = np.exp(logs)
        return np.log((attention / attend + products / multiply + others / rest) / measured)

    def residuals(logs):
        unequal = [logs[0] - logs[1], logs[2] - logs[1]]
        return [*errors(logs), *np.multiply(np.sqrt(factors.STIFFNESS), unequal)]

    solution = optimize.least_squares(residuals, [-0.5, -0.5, -0.5], xtol=1e-12).x
    rates = factor.rates
    own = [rates.attention, rates.products, rates.others]
    np.testing.assert_allclose(own, np.exp(solution), rtol=1e-4)
    assert rates.attention < 0.25 and rates.others > rates.products

    # A step whose bound is half attention's, and its band by the slowest and the fastest record.
    half = dataclasses.replace(factor, shares=factors.Shares(0.5, 0.25))
    expected = half.expected(4.0)
    secs = 2.0 / own[0] + 1.0 / own[1] + 1.0 / own[2]
    np.testing.assert_allclose(expected.secs, secs)
    off = np.exp(errors(np.log(own)))
    np.testing.assert_allclose(expected.least_secs, expected.secs / off.max())
    np.testing.assert_allclose(expected.most_secs, expected.secs / off.min())


def test_kinds_of_work_that_are_alike_in_all_steps_have_one_rate():
    """Nothing distinguishes the rates, so that the price makes them equal."""
    measured = np.array([4.0, 5.0, 6.0])
    rates = _of_parts(0.1 * measured, 0.4 * measured, 0.2 * measured, measured).rates
    np.testing.assert_allclose([rates.attention, rates.products, rates.others], 0.7)


def test_work_that_is_missing_in_all_steps_has_the_rate_of_products():
    none = np.zeros(3)
    rates = _of_parts(none, np.array([2.0, 1.0, 3.0]), np.array([1.0, 2.0, 1.0]), [4, 4, 7]).rates
    assert rates.attention == pytest.approx(rates.products)
    assert rates.others != pytest.approx(rates.products, rel=0.01)


def test_rates_are_found_from_times_of_very_different_magnitudes():
    attention = np.array([1e-4, 1.0, 1e-4])
    products = np.array([1.0, 1e-4, 1.0])
    rates = _of_parts(attention, products, 1e-4 * products, attention / 0.01 + products).rates
    assert rates.attention < 0.03 and rates.products > 0.5


def test_shares_unlike_all_fitted_ones_are_named():
    one = np.ones(2)
    factor = _of_parts(0.2 * one, [1.0, 0.5], 0.5 * one, [3.0, 2.5])
    alike = dataclasses.replace(factor, shares=factors.Shares(0.15, 0.5))
    assert alike.outside(1.5, 8) == ()
    long_rows = dataclasses.replace(factor, shares=factors.Shares(0.6, 0.3))
    assert long_rows.outside(1.4, 8) == (
        "60% of the bound in attention's kernels",
        "10% of the bound in memory and network",
    )


def test_a_single_record_is_fitted():
    factor = factors.by_machine([record("a", 0.5)])["v3"]
    assert factor.value == factor.lowest == factor.highest == 0.5
    assert factor.held_out == ()


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
        ({"topology": "v4:2x2"}, "a: v4:2x2 is not a topology of v3"),
        ({"id": "b"}, "b is listed twice"),
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


def test_the_json_has_the_contents_of_the_text(factor):
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
