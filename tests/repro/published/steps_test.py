"""Published steps beside handmade plans."""

import dataclasses
import json

import pytest

from repro.published import rebuilt, records, steps, steps_text
from repro.published.steps import Step
from repro.tables import commands
from tests.xla_plan import samples
from xla_plan.cost.step_cost import Times
from xla_plan.expected import factors
from xla_plan.plans import plan_folder

_COST = dataclasses.replace(
    samples.cost(), roofline_secs=Times(compute=0.3, step=0.5), overlapped_secs=0.1
)


def _plan(cost):
    return samples.program(
        cost,
        topology="v5e:2x4",
        mesh={"data": 1, "fsdp": 8, "tensor": 1},
        memory_gib=samples.memory(9.5 if cost else 20.0, capacity=15.75),
        compile_secs=1.0,
    )


def _step(name="a.b", **fields):
    known = {
        "topology": "v5e:2x4",
        "model": "1 B weights",
        "devices": 8,
        "row_tokens": 1024,
        "measured_secs": 0.8,
        "source": "owner/project file",
        "cost": _COST,
        "gib": 9.5,
        "capacity_gib": 15.75,
        "compile_secs": 1.0,
    }
    return Step(id=name, **(known | fields))


def test_bounds_are_written_in_the_form_that_factors_reads(tmp_path):
    planned = [
        _step("z"),
        _step("a", topology="h100:1x8"),
        _step("guess", no_bound="it is a guess"),
        _step("large", cost=None),
        _step("ran", measured_secs=None),
    ]
    path = tmp_path / "bounds.json"
    steps.save_bounds(planned, path)
    written = json.loads(path.read_text())
    assert [entry["id"] for entry in written] == ["a", "z"]
    assert written[1]["bound_secs"] == pytest.approx(0.4)
    assert written[1]["products_secs"] == 0.3
    read = factors.Bound(**written[1])
    assert read.share == pytest.approx(0.5) and read.project == "owner/project"


def test_tables_have_shares_and_steps_that_beat_their_bound():
    text = steps_text.tables(
        [_step("one"), _step("two", measured_secs=0.5), _step("guess", no_bound="a guess")]
    )
    assert "| one | v5e:2x4 | 8 | 300 | 400 | 800 | 0.50 |" in text
    assert "v5e: 2 bounds, 0.50 to 0.80 of the measured time, median 0.65." in text
    assert "| guess * |" in text and "* not among the bounds: a guess" in text


def test_the_memory_of_plans_is_compared_with_measured_runs():
    text = steps_text.tables(
        [
            _step("fits"),
            _step("failed", ran=False, measured_secs=None, cost=None, gib=20.0),
            _step("wrong", ran=False, measured_secs=None),
            _step("tight", source="other", cost=None, gib=16.0),
        ]
    )
    assert "Of 4 steps, 2 of which ran out of memory, 2 have a plan that agrees." in text
    assert "| failed | v5e:2x4 | 20.0 | 15.8 | does not fit | out of memory |" in text
    assert "| wrong | v5e:2x4 | 9.5 | 15.8 | fits | out of memory |" in text
    assert "- tight ran, and its plan needs 16.0 of 15.8 GiB." in text


def test_plans_are_kept_and_printed_again(tmp_path):
    record = records.load()[0]
    plan_folder.save(_plan(_COST), tmp_path / "records" / record.id, report="")
    (step,) = steps.load_all(tmp_path)
    assert step.id == record.id and step.cost.step_secs == _COST.step_secs

    told = []
    commands.show_kept_published(tmp_path, tmp_path / "out", told.append)
    assert record.id in told[0]
    assert (tmp_path / "out" / steps.BOUNDS_JSON).is_file()


def test_a_folder_without_plans_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="no plan of a published step there; `plan_tables --table="
    ):
        steps.load_all(tmp_path)


def test_a_plan_is_made_once_unless_the_step_or_the_compiler_changes(tmp_path, monkeypatch):
    made = []

    def make(function, record):
        made.append(record.id)
        return _plan(_COST)

    monkeypatch.setattr(rebuilt.own_process, "call", make)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    record = records.load()[0]
    longer = dataclasses.replace(record.run, rows=2 * record.run.rows)
    for changed in (record, record, dataclasses.replace(record, run=longer)):
        rebuilt.load_or_make(changed, tmp_path)
    assert len(made) == 2
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=true")
    rebuilt.load_or_make(record, tmp_path)
    assert len(made) == 3


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llm-foundry.1b.2048.h100.8.112", "maxtext.v5e.16B.1x256"])
def test_a_record_is_rebuilt_for_its_machine(name):
    (record,) = (record for record in records.load() if record.id == name)
    if not rebuilt.topology.is_installed(record.topology):
        pytest.skip("its compiler is not installed")
    plan = rebuilt.make(record)
    assert plan.fits and not plan.cost.uncounted_kernels
    # No step is faster than its bound, and products take most of it.
    assert 0.4 * record.measured_secs < plan.cost.step_secs < record.measured_secs
    assert plan.cost.roofline_secs.compute > 0.5 * plan.cost.step_secs
