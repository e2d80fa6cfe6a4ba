"""Tables and lines of progress, from handmade plans."""

import dataclasses

from repro.tables import report
from repro.tables.as_printed import FAMILY
from repro.tables.family import PlannedRun
from tests.xla_plan import samples
from xla_plan.plans.program_plan import Batch


def _plans():
    made = {}
    for run in FAMILY:
        network = 0.2 if run.cores == 2048 else 0.05
        cost = None if run.layers == 60 else samples.cost(0.5, network, 1000 + run.cores // 16)
        made[run] = samples.plan(
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
    """Returns the cells, without spaces, of the table under a title, by the row's name."""
    head, *lines = text.partition(title + "\n")[2].partition("\n\n")[0].splitlines()
    count = len([cell for cell in head.split("  ") if cell])
    return {line.rsplit(maxsplit=count)[0]: line.rsplit(maxsplit=count)[1:] for line in lines}


def test_every_table_shows_the_papers_values():
    text = _text(_plans())
    for part in ("Table 3", "x3.75", "x1.7", "16% to 36%", "70% to 48%", "Figure 9"):
        assert part in text
    rows = _rows(text, "36 layers")  # 128, 512 and 2048 cores, and the last over the first.
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


def test_suspicious_programs_are_listed():
    made = _plans()
    assert "No program that fits gathers weights, experts or tokens." in _text(made)
    first = FAMILY[0]
    gathering = samples.program(samples.cost(), suspicious=("all-gather of 3.0 MiB a call",))
    programs = made[first].programs | {"evaluate": gathering}
    text = _text(made | {first: dataclasses.replace(made[first], programs=programs)})
    assert "suspicious in evaluate of MoE(128E, 12L): all-gather of 3.0 MiB a call" in text
    assert "No program that fits gathers" not in text
