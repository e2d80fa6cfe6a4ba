"""Plans in folders."""

import json

import pytest

from tests.xla_plan import samples
from xla_plan.plans import plan_folder
from xla_plan.plans.program_plan import ProgramPlan

_PLAN = samples.program(samples.cost())


def _load(folder):
    return plan_folder.load(ProgramPlan, folder)


@pytest.mark.parametrize("cost", [samples.cost(), None])
def test_a_plan_is_read_back_unchanged_beside_its_report(tmp_path, cost):
    made = samples.program(cost)
    plan_folder.save(made, tmp_path, "the report")
    assert _load(tmp_path) == made
    assert (tmp_path / "report.md").read_text() == "the report"


def test_the_fields_of_the_file(tmp_path):
    plan_folder.save(_PLAN, tmp_path, "")
    values = json.loads((tmp_path / "plan.json").read_text())
    asked = "name topology mesh fits memory_gib cost suspicious largest_buffers expected"
    assert set(asked.split()) <= values.keys()
    assert set(values["memory_gib"]) == {"capacity", "roles", "outputs", "temporaries", "peak"}
    role = values["memory_gib"]["roles"]["expert weights"]
    assert role == {"arguments": 8, "gib": 2.0, "donated_gib": 2.0, "host_gib": 0.0}
    assert set(values["cost"]["roofline_secs"]) == {"compute", "memory", "network", "step"}
    collective = values["cost"]["collectives"][0]
    assert set(collective) == {"kind", "count", "bytes", "source", "line"}


def test_missing_and_damaged_plans_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no plan.json there; `plan ... --out=.*` makes one"):
        _load(tmp_path)
    assert plan_folder.find(ProgramPlan, tmp_path) is None

    plan_folder.save(_PLAN, tmp_path, "")
    path = tmp_path / "plan.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"compile_secs": values["compile_secs"] + 1}))
    with pytest.raises(ValueError, match=r"plan.json is damaged or outdated: its digest is not"):
        _load(tmp_path)

    del values["memory_gib"]["peak"]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"plan.json is damaged or outdated \(KeyError"):
        plan_folder.find(ProgramPlan, tmp_path)


@pytest.mark.parametrize("damage", ["plan.json", "fingerprint", "cut", "digit", "interrupted"])
def test_a_damaged_or_interrupted_plan_is_made_again(tmp_path, damage):
    made = []

    def make():
        made.append(_PLAN)
        return _PLAN

    def load_or_make(fingerprint="a"):
        return plan_folder.load_or_make(ProgramPlan, tmp_path, fingerprint, make, lambda _: "")

    assert load_or_make() == load_or_make() == _PLAN and len(made) == 1
    load_or_make("b")
    assert load_or_make("b") == _PLAN and len(made) == 2

    path = tmp_path / "plan.json"
    match damage:
        case "cut":
            path.write_text(path.read_text()[:-9])
        case "digit":  # It is JSON like any other.
            path.write_text(path.read_text().replace('"capacity": 1', '"capacity": 2'))
        case "interrupted":
            with pytest.raises(KeyboardInterrupt), plan_folder.replacing(tmp_path, "b"):
                raise KeyboardInterrupt
        case name:
            (tmp_path / name).unlink()
    assert load_or_make("b") == _PLAN and len(made) == 3
