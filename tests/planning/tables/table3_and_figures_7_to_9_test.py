"""Tables of the family from plans made by hand."""

import dataclasses

import pytest

from lingvo_gshard import registry
from lingvo_gshard.planning import commands, kept_plans
from lingvo_gshard.planning.plan import Batch
from lingvo_gshard.planning.tables import report, table3_and_figures_7_to_9
from lingvo_gshard.planning.tables.table3_and_figures_7_to_9 import PlannedRun
from lingvo_gshard.planning.tables.table3_as_printed import FAMILY
from tests.planning import plans


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
    return report.family_tables([PlannedRun(run, plan) for run, plan in made.items()])


def _rows(text, title):
    """Returns the cells of the table under a title, by the row's name; none of them has a space."""
    head, *lines = text.partition(title + "\n")[2].partition("\n\n")[0].splitlines()
    count = len([cell for cell in head.split("  ") if cell])
    return {line.rsplit(maxsplit=count)[0]: line.rsplit(maxsplit=count)[1:] for line in lines}


def test_the_family_is_registered_on_as_many_cores():
    for run in FAMILY:
        params = registry.get_params(run.model)
        assert params.task.encoder.num_layers + params.task.decoder.num_layers == run.layers
        assert params.task.encoder.moe.num_experts == run.cores
        assert params.input.batch_size * params.input.target_len == run.batch_tokens


def test_core_years_follow_from_the_papers_own_figures():
    """Cores * 10^12 tokens / (steps/s * tokens of a batch): Table 3 is consistent to 20 %."""
    for run in FAMILY:
        if run.steps_per_sec and run.core_years:
            secs = 1e12 / run.batch_tokens / run.steps_per_sec
            assert run.cores * secs / 3.156e7 == pytest.approx(run.core_years, rel=0.2)


def test_every_table_shows_the_papers_values(tmp_path):
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


def test_the_family_is_planned_and_drawn(monkeypatch, tmp_path):
    made = {run.model: plan for run, plan in _plans().items()}
    monkeypatch.setattr(kept_plans, "load_or_make", lambda request, folder: made[request])
    told = []
    commands.plan_family(lambda model, topology: model, tmp_path, told.append)
    *progress, text = told
    assert progress[0] == "MoE(128E, 12L): fits" and text == _text(_plans())
    for name in ("figure_7.png", "figure_8.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


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


def test_the_model_of_figure_9_grows_as_the_paper_measured():
    lines = _text(_plans()).partition("Figure 9")[2].splitlines()
    growths = {line.split(" MiB")[0]: float(line.split()[-1]) for line in lines if " MiB " in line}
    assert growths["all-to-all 8"] == growths["all-to-all 32"]
    assert growths["all-to-all 8"] == pytest.approx(9.0, rel=0.3)  # As printed.
    assert growths["all-reduce 8"] == pytest.approx(1.0, abs=0.2)


def test_figure_9_has_a_point_for_each_collective_and_number_of_cores():
    points = list(table3_and_figures_7_to_9.figure_9())
    assert {point.cores for point in points} == {16, 32, 64, 128, 256, 512, 1024, 2048}
    assert len(points) == 8 * 2 * 2
    least, most = (point.secs for point in points[:2])  # 8 and 32 MiB.
    assert most == pytest.approx(4 * least)
