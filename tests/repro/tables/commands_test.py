"""The output of `plan_tables` for its flags, from handmade plans."""

import subprocess

import pytest

from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.plans import kept_plans
from repro.tables import commands, late_sums, paper, report, sbp
from repro.tables.as_printed import FAMILY
from repro.tables.family import PlannedRun
from tests import without
from tests.xla_plan import samples
from xla_plan.machines import topology


@pytest.fixture(autouse=True)
def _without_tracing(monkeypatch):
    """Gives all models the same figures; paper_test.py checks the real ones."""
    own = paper.OwnModel(weights=10**9, step_flops=1e15, remat=Remat.BLOCK)
    monkeypatch.setattr(paper, "own_model", lambda model: own)


@pytest.mark.slow
def test_the_family_is_planned_and_drawn(monkeypatch, tmp_path):
    made = {}
    for run in FAMILY:
        made[run.model] = samples.plan(samples.cost(), cores=run.cores, model=run.model)
    monkeypatch.setattr(kept_plans, "load_or_make", lambda request, folder: made[request])
    told = []
    commands.plan_family(lambda model, topology: model, tmp_path, False, told.append)

    *progress, text = told
    assert progress[0] == "MoE(128E, 12L): fits" and len(progress) == len(FAMILY)
    planned = [PlannedRun(run, made[run.model]) for run in FAMILY]
    assert text == report.family_tables(planned, paper.recomputed(None))
    for name in ("figure_7.png", "figure_8.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_kept_plans_of_the_family_are_printed_and_drawn(tmp_path):
    run = FAMILY[0]
    kept = samples.plan(samples.cost(), cores=run.cores, model=run.model)
    samples.save(kept, tmp_path / "kept" / "MoE128E12L")
    told = []
    commands.show_kept_family(tmp_path / "kept", tmp_path / "drawn", told.append)
    assert told == [
        report.family_tables([PlannedRun(run, kept)], paper.recomputed(tmp_path / "kept"))
    ]

    commands.show_paper(tmp_path / "kept", tmp_path / "drawn", told.append)
    # Figure 1 has the planned core-years beside the printed ones.
    line = next(line for line in told[1].splitlines() if line.startswith("MoE(128E, 12L)"))
    assert line.split()[-3:] == ["1.9", f"{kept.core_years():.1f}", "-"]
    assert "Without our plans" not in told[1]
    drawn = [path.name for path in sorted((tmp_path / "drawn").iterdir())]
    assert drawn == ["figure_1.png", "figure_7.png", "figure_8.png"]


@pytest.mark.parametrize("name", [None, "h100:1x8"])
def test_oneflow_s_tables_are_printed_for_a_named_topology_too(monkeypatch, name):
    compilers = []

    def measure(cases, compile):
        compilers.append(compile)
        return []

    monkeypatch.setattr(sbp, "measure", measure)
    monkeypatch.setattr(late_sums, "measure", lambda compile: [])
    monkeypatch.setattr(topology, "devices", lambda name: [])
    told = []
    commands.compile_states(name, told.append)

    titles = [text for text in told if text.startswith("On 8 of")]
    assert titles[0] == "On 8 of JAX's own devices: signatures, along one axis of 8"
    if name is None:
        assert len(told) == 8 and len(titles) == 1
    else:
        assert len(told) == 16 and titles[1].startswith("On 8 of h100:1x8")
        assert compilers[-1].keywords == {"name": name}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_table_is_printed_without_matplotlib():
    command = without.command(("matplotlib",), "repro.plan_tables", "--table=paper")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Figure 1: quality and cost by size")
