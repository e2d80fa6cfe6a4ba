"""Plans as files, and the rates that follow from them."""

import json

import pytest

from lingvo_gshard.planning import plan
from lingvo_gshard.planning.published import factors
from tests.planning import plans, published_steps
from tests.planning.published_steps import record

_OTHERS = {"evaluate": plans.program(plans.cost()), "decode": plans.program(None)}


@pytest.mark.parametrize("cost", [plans.cost(), None])
@pytest.mark.parametrize("programs", [{}, _OTHERS])
def test_a_plan_comes_back_from_its_file_as_it_was(tmp_path, cost, programs):
    kept = plans.plan(cost, programs=programs)
    plan.save(kept, tmp_path)
    assert plan.load(tmp_path) == kept


def test_the_file_has_every_program_and_whether_all_fit(tmp_path):
    plan.save(plans.plan(plans.cost(), programs=_OTHERS), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"] is True and values["all_fit"] is False
    assert list(values["programs"]) == ["train", "evaluate", "decode"]
    asked = "fits memory_gib largest_buffers suspicious cost lower_secs compile_secs"
    for program in values["programs"].values():
        assert set(asked.split()) <= program.keys()
    assert values["programs"]["train"]["cost"]["roofline_secs"] == values["roofline_secs"]
    assert values["programs"]["decode"]["cost"] is None


def test_a_plan_of_the_training_step_alone_by_an_older_version_is_refused(tmp_path):
    plan.save(plans.plan(plans.cost()), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    del values["programs"]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is damaged or outdated .KeyError.'programs'"):
        plan.load(tmp_path)


def test_the_fields_of_the_file(tmp_path):
    plan.save(plans.plan(plans.cost()), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    asked = """model topology cores weights tokens_per_core fits memory_gib collectives
        flops_per_core roofline_secs xla_optimal_secs lower_secs compile_secs instructions
        host_peak_gib"""
    assert set(asked.split()) <= values.keys()
    assert set(values["memory_gib"]) == {
        *("capacity", "replicated_weights", "expert_weights", "optimizer_slots"),
        *("temporaries", "peak"),
    }
    assert set(values["roofline_secs"]) == {"compute", "memory", "network", "step"}
    assert set(values["collectives"][0]) == {"kind", "count", "bytes", "source"}


def test_the_file_has_what_is_expected_by_published_steps(monkeypatch, tmp_path):
    records = [record("a", 0.4), record("b", 0.7), record("c", 0.9)]
    bounds = published_steps.write(tmp_path / "bounds.json", *records)
    monkeypatch.setattr(factors, "BOUNDS", bounds)

    plan.save(plans.plan(plans.cost(step_secs=0.5)), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["expected"]["step_secs"] == pytest.approx(0.5 / 0.6)
    assert values["expected"]["least_step_secs"] == pytest.approx(0.5 / 0.9)
    assert values["expected"]["most_step_secs"] == pytest.approx(0.5 / 0.4)
    assert values["expected"]["fitted_records"] == ["a", "c"]
    assert values["steps_per_sec"] == {"at_roofline": 2.0, "expected": pytest.approx(1.2)}
    years = values["core_years_of_1e12_tokens"]
    assert years["expected"] == pytest.approx(years["at_roofline"] / 0.6)

    # Nothing is known of another machine, and what does not fit takes no time.
    plan.save(plans.plan(plans.cost(step_secs=0.5), topology="h100:16x8"), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["expected"] is None
    assert values["steps_per_sec"] == {"at_roofline": 2.0, "expected": None}
    plan.save(plans.plan(None), tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["expected"] is None


def test_a_plan_that_does_not_fit_has_no_times(tmp_path):
    plan.save(plans.plan(None), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"] is False and values["memory_gib"]["peak"] == 20.0
    assert values["roofline_secs"] is values["collectives"] is values["steps_per_sec"] is None


def test_a_plan_without_a_training_step_has_none_of_its_fields(tmp_path):
    decoding = plans.without_a_step(decode=plans.program(plans.cost()))
    plan.save(decoding, tmp_path)
    assert plan.load(tmp_path) == decoding and decoding.main == "decode"
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["all_fit"] is True and values["programs"]["decode"]["fits"] is True
    for name in ("fits", "memory_gib", "roofline_secs", "expected", "tokens_per_sec"):
        assert values[name] is None, name
    with pytest.raises(ValueError, match="on v3:8x8 has no training step; `plan --programs=train`"):
        decoding.tokens_per_sec()


def test_rates_and_core_years():
    kept = plans.plan(plans.cost(step_secs=0.5), cores=128)
    assert kept.steps_per_sec() == 2.0 and kept.steps_per_sec(0.48) == 0.96
    assert kept.tokens_per_core == 8192
    assert kept.tokens_per_sec() == 2.0 * 8192 * 128 and kept.tokens_per_sec(0.5) == 8192 * 128
    years = 1e12 / (2 * 8192) / (365.25 * 24 * 3600)
    assert kept.core_years() == pytest.approx(years)
    assert plans.plan(None).core_years() == float("inf")


def test_missing_and_damaged_plans_are_refused(tmp_path):
    plan.save(plans.plan(plans.cost()), tmp_path / "digit")
    path = tmp_path / "digit" / "plan.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"host_peak_gib": values["host_peak_gib"] + 1}))
    with pytest.raises(ValueError, match=r"plan.json is damaged or outdated: its digest is not"):
        plan.load(tmp_path / "digit")

    with pytest.raises(ValueError, match=r"no plan.json there; `plan --out=.*` makes one"):
        plan.load(tmp_path)
    plan.save(plans.plan(plans.cost()), tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    del values["programs"]["train"]["memory_gib"]["peak"]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"plan.json is damaged or outdated \(KeyError"):
        plan.load(tmp_path)
