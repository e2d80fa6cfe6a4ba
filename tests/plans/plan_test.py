"""The plan of an experiment: its programs, and the rates that follow from them."""

import pytest

from tests.repro.published import published_steps
from tests.repro.published.published_steps import record
from tests.xla_plan import samples
from xla_plan.expected import factors

_OTHERS = {"evaluate": samples.program(samples.cost()), "decode": samples.program(None)}


@pytest.mark.parametrize("cost", [samples.cost(), None])
@pytest.mark.parametrize("programs", [{}, _OTHERS])
def test_a_plan_equals_its_saved_file(tmp_path, cost, programs):
    kept = samples.plan(cost, programs=programs)
    samples.save(kept, tmp_path)
    assert samples.load(tmp_path) == kept


def test_the_file_of_an_older_version_is_refused(tmp_path):
    """Its training step's fields are at the top level, and its weights lack a role."""
    samples.save(samples.plan(samples.cost()), tmp_path)
    path = tmp_path / "plan.json"
    older = path.read_text().replace('"roles"', '"replicated_weights"')
    path.write_text(older)
    with pytest.raises(ValueError, match=r"is damaged or outdated \(KeyError.*; plan again"):
        samples.load(tmp_path)


def test_expected_rates_follow_published_steps(monkeypatch, tmp_path):
    records = [record("a", 0.4), record("b", 0.7), record("c", 0.9)]
    bounds = published_steps.write(tmp_path / "bounds.json", *records)
    monkeypatch.setattr(factors, "BOUNDS", bounds)

    values = samples.plan(samples.cost(step_secs=0.5)).derived()
    assert values["all_fit"] and values["tokens_per_core"] == 8192
    assert values["expected"]["step_secs"] == pytest.approx(0.5 / 0.6)
    assert values["expected"]["least_step_secs"] == pytest.approx(0.5 / 0.9)
    assert values["expected"]["most_step_secs"] == pytest.approx(0.5 / 0.4)
    assert values["expected"]["fitted_records"] == ["a", "c"]
    assert values["steps_per_sec"] == {"at_roofline": 2.0, "expected": pytest.approx(1.2)}
    years = values["core_years_of_1e12_tokens"]
    assert years["expected"] == pytest.approx(years["at_roofline"] / 0.6)

    # Another machine lacks published steps.
    values = samples.plan(samples.cost(step_secs=0.5), topology="h100:16x8").derived()
    assert values["expected"] is None
    assert values["steps_per_sec"] == {"at_roofline": 2.0, "expected": None}


def test_a_plan_that_does_not_fit_has_no_times():
    values = samples.plan(None).derived()
    assert not values["all_fit"] and values["tokens_per_core"] == 8192
    assert values["expected"] is values["steps_per_sec"] is values["tokens_per_sec"] is None


def test_a_plan_without_a_training_step_has_no_rates():
    decoding = samples.without_a_step(decode=samples.program(samples.cost()))
    assert decoding.main.name == "decode"
    values = decoding.derived()
    assert values.pop("all_fit") is True and not any(values.values())
    with pytest.raises(
        ValueError, match="on v3:8x8 has no training step; `plan model --programs=train`"
    ):
        decoding.tokens_per_sec()


def test_rates_and_core_years():
    kept = samples.plan(samples.cost(step_secs=0.5), cores=128)
    assert kept.steps_per_sec() == 2.0 and kept.steps_per_sec(0.48) == 0.96
    assert kept.tokens_per_core == 8192
    assert kept.tokens_per_sec() == 2.0 * 8192 * 128 and kept.tokens_per_sec(0.5) == 8192 * 128
    years = 1e12 / (2 * 8192) / (365.25 * 24 * 3600)
    assert kept.core_years() == pytest.approx(years)
    assert samples.plan(None).core_years() == float("inf")
    assert samples.plan(None).steps_per_sec() == 0.0
