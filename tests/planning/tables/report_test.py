"""Tables and lines of progress, from plans made by hand."""

import dataclasses
import pathlib

import pytest

from lingvo_gshard.planning.estimate import agreement
from lingvo_gshard.planning.plan import Batch
from lingvo_gshard.planning.published import factors
from lingvo_gshard.planning.tables import report
from lingvo_gshard.planning.tables.as_printed import FAMILY
from lingvo_gshard.planning.tables.family import PlannedRun
from lingvo_gshard.planning.tables.machines import Machine
from lingvo_gshard.planning.tables.trials import Trial
from tests.planning import plans, published_steps, tiny
from tests.planning.published_steps import record


def _trial(name, cost, **changes):
    """Returns a trial whose step has that cost; without a cost it does not fit."""
    return Trial(name, tiny.request(), pathlib.Path(name), plans.plan(cost), **changes)


def test_a_trial_fits_or_does_not_or_is_refused():
    assert report.trial_line(_trial("a", plans.cost())) == "a: fits, 9.00 GiB, 500.00 ms a step"
    assert report.trial_line(_trial("b", None)) == "b: does not fit, 20.00 of 15.48 GiB"
    refused = dataclasses.replace(_trial("c", None), plan=None, refusal="E=7 is not divisible")
    assert report.trial_line(refused) == "c: refused: E=7 is not divisible"


def test_a_remedy_has_the_flags_that_it_adds():
    request = tiny.request(settings=("train.seed=3",))
    changed = tiny.request(settings=("train.seed=3", "input.batch_size=8", "task.dim=4"))
    trial = dataclasses.replace(_trial("half", plans.cost()), request=changed)
    assert report.remedy_line(trial, request) == (
        "  half: fits, 9.00 GiB, 500.00 ms a step (--set=input.batch_size=8 --set=task.dim=4)"
    )
    assert report.training_flags_line(trial) == (
        "to train so: --set=train.seed=3 --set=input.batch_size=8 --set=task.dim=4"
    )


def test_the_choice_is_explained_by_the_second():
    best = _trial("fast", plans.cost(0.25, 0.05), estimated_secs=0.2)
    second = _trial("slow", plans.cost(0.5, 0.3), estimated_secs=0.6)
    head, first, _, unfit, agreement, choice = report.ranking(
        [best, second, _trial("big", None)]
    ).splitlines()
    assert head.split()[:2] == ["partitioning", "GiB"]
    assert first.split() == ["fast", "9.00", "250.00", "100.00", "100.00", "50.00", "200.00"]
    assert unfit == "big: does not fit, 20.00 of 15.48 GiB"
    assert agreement.startswith("the cost model's steps: 0.80 to 1.20 of the compiled ones")
    assert choice == (
        "chosen: fast: 2.00 times as fast as slow at the roofline, most of it network time "
        "(250.00 ms less)."
    )


def test_a_choice_without_a_second_and_without_a_first():
    unfit = _trial("big", None)
    *_, last, choice = report.ranking([_trial("fast", plans.cost()), unfit]).splitlines()
    assert last.startswith("big: ") and choice == "chosen: fast, the only one that fits."
    assert report.ranking([unfit]).splitlines()[-1] == "chosen: none, for none fits."


def test_the_agreement_of_estimated_and_compiled_steps():
    found = agreement.of([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0)])
    assert report.agreement_line(found) == (
        "the cost model's steps: 0.50 to 2.00 of the compiled ones, rank correlation 0.50 over 3 "
        "candidates"
    )


def test_saved_programs_are_named():
    folder = pathlib.Path("plan/executables")
    line = report.saved_line(["train_2"], folder)
    assert line.startswith("saved the compiled program train_2 (of train.iterations_per_loop ")
    assert line.endswith("`trainer --executables=plan/executables` loads it")
    line = report.saved_line(["train_2", "train_1"], folder)
    assert line.startswith("saved the compiled programs train_2, train_1 ")
    assert line.endswith(" loads them")


def test_machines_are_columns(monkeypatch, tmp_path):
    path = published_steps.write(tmp_path / "bounds.json", record("a", 0.5, "v4"))
    monkeypatch.setattr(factors, "BOUNDS", path)
    machines = [
        Machine("v3:8x8", plans.plan(None, topology="v3:8x8")),
        Machine("v4:4x4x4", plans.plan(plans.cost(), topology="v4:4x4x4")),
        Machine("gb200:2x64", None),
    ]
    assert [report.machine_line(machine) for machine in machines] == [
        "v3:8x8: does NOT fit: train",
        "v4:4x4x4: fits",
        "gb200:2x64: left out, its compiler is not installed",
    ]

    header, *lines = report.machines_table(machines).splitlines()
    assert header.split() == ["v3:8x8", "v4:4x4x4", "ratio"]
    rows = {line.partition("  ")[0]: line.split()[-3:] for line in lines}
    assert rows["devices"][:2] == ["128", "128"] and rows["fits"][:2] == ["0", "1"]
    # 10^12 tokens at 2^20 in half a second, on 128 devices.
    without, hours, _ = rows["device-hours for 10^12 tokens"]
    assert without == "-" and float(hours) == pytest.approx(128e12 / 2**21 / 3600, rel=1e-3)

    # Steps that took twice as long as their bound were published for one of them.
    assert rows["expected step ms"][:2] == ["-", "1000"]
    assert rows["expected device-hours"][1] == f"{2 * float(hours):.0f}"
    assert lines[-1].startswith("expected on v4: the bound over 0.50, as 1 published")


def test_compilations_have_the_growth_from_the_first_to_the_last():
    compiled = {
        "8 cores": plans.plan(plans.cost(instructions=1000), compile_secs=10.0),
        "2048 cores": plans.plan(plans.cost(instructions=1100), compile_secs=12.0),
    }
    header, *lines = report.compilations_table(compiled).splitlines()
    assert header.split() == ["8", "cores", "2048", "cores", "ratio"]
    rows = {line.partition("  ")[0]: line.split()[-3:] for line in lines}
    assert rows["instructions"] == ["1000", "1100", "1.100"]
    assert rows["compile s"] == ["10", "12", "1.200"]


def _plans():
    made = {}
    for run in FAMILY:
        network = 0.2 if run.cores == 2048 else 0.05
        cost = None if run.layers == 60 else plans.cost(0.5, network, 1000 + run.cores // 16)
        made[run] = plans.plan(
            cost,
            cores=run.cores,
            model=run.model,
            batch=Batch(run.batch_tokens // 256, 256, 256),
            compile_cpu_secs=30.0 + run.layers + run.cores / 128,
        )
    return made


def _text(made):
    """Returns the tables of plans by the paper's runs."""
    return report.family_tables([PlannedRun(run, plan) for run, plan in made.items()], [])


def _rows(text, title):
    """Returns the cells of the table under a title, by the row's name; none of them has a space."""
    head, *lines = text.partition(title + "\n")[2].partition("\n\n")[0].splitlines()
    count = len([cell for cell in head.split("  ") if cell])
    return {line.rsplit(maxsplit=count)[0]: line.rsplit(maxsplit=count)[1:] for line in lines}


def test_every_table_shows_the_papers_values():
    text = _text(_plans())
    for part in ("Table 3", "x3.75", "x1.7", "16% to 36%", "70% to 48%", "Figure 9"):
        assert part in text
    rows = _rows(text, "36 layers")  # On 128, 512 and 2048 cores, and the last over the first.
    assert rows["cores"] == ["128", "512", "2048", "16.000"]
    assert rows["steps/s"] == ["2", "2", "2", "1.000"]
    assert rows["paper's steps/s"] == ["0.67", "1.05", "0.72", "1.075"]
    assert rows["paper's % of our steps/s"] == ["33.5", "52.5", "36", "1.075"]
    assert rows["paper's weights B"] == ["37", "150", "600", "16.216"]
    assert rows["weights B"] == ["12.5", "12.5", "12.5", "1.000"]
    assert rows["core-years"][2] == "7.736" and rows["paper's core-years"][2] == "22.4"
    assert rows["instructions"] == ["1008", "1032", "1128", "1.119"]
    assert rows["compile CPU s"] == ["67", "70", "82", "1.224"]
    deepest = _rows(text, "60 layers")
    assert deepest["fits"][0] == "0" and "steps/s" not in deepest
    assert deepest["paper's weights B"][0] == "1000"


def test_the_growth_of_evaluation_and_decoding_is_a_row():
    made = {}
    for run, plan in _plans().items():
        memory = dataclasses.replace(plan.step.memory_gib, peak=2.0 + run.cores / 1024)
        decode = plans.program(plans.cost(2.0), memory_gib=memory, batch=Batch(run.cores, 256, 256))
        made[run] = dataclasses.replace(plan, programs=plan.programs | {"decode": decode})
    rows = _rows(_text(made), "36 layers")
    assert rows["decode GiB"] == ["2.125", "2.5", "4", "1.882"]
    assert rows["decode K tokens/s"] == ["16.38", "65.54", "262.1", "16.000"]


def test_growth_is_per_token():
    # On 2048 cores, a core has a quarter of the tokens; an equal step is four times a token's.
    rows = _rows(_text(_plans()), "36 layers")
    assert rows["us a token of a core"][-1] == "4.000"
    assert rows["AllToAll us a token of a core"][-1] == "16.000"
    assert rows["paper's us a token of a core"][-1] == "3.722"
    # Without the optimizer and the vocabulary: 0.05 of 0.6 * 0.45 + 0.05 s.
    assert rows["AllToAll % of the layers"][0] == "15.63"


def test_suspicious_programs_are_listed():
    made = _plans()
    assert "None that fits gathers weights, experts or tokens." in _text(made)
    first = FAMILY[0]
    gathering = plans.program(plans.cost(), suspicious=("all-gather of 3.0 MiB a call",))
    programs = made[first].programs | {"evaluate": gathering}
    text = _text(made | {first: dataclasses.replace(made[first], programs=programs)})
    assert "suspicious in evaluate of MoE(128E, 12L): all-gather of 3.0 MiB a call" in text
    assert "None that fits gathers" not in text
