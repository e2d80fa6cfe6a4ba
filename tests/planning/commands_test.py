"""What `plan` tells for its flags, from plans made by hand."""

import dataclasses

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.input import packing
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.planning import commands, kept_plans, plan
from lingvo_gshard.planning.compiled import own_process, trainer_executables
from lingvo_gshard.planning.request import Request
from lingvo_gshard.planning.tables import (
    compilation_growth,
    late_sums,
    paper,
    report,
    sbp,
    table4,
)
from lingvo_gshard.planning.tables.as_printed import FAMILY
from lingvo_gshard.planning.tables.family import PlannedRun
from lingvo_gshard.runs import experiment_programs
from lingvo_gshard.spmd import topology
from lingvo_gshard.train.programs import Programs
from tests.model import small_task
from tests.planning import plans, tiny

_MODEL = "toy.MoE8E4L"
_VOCABULARIES = ("task.source_vocab_size=64", "task.target_vocab_size=64")


def _request(settings=()):
    params = registry.get_params(_MODEL, settings)
    return Request(_MODEL, settings, params, "v3:2x2", placement.partitioning(params, 8))


# A plan, and what would make it fit.


def _plan_if(monkeypatch, fits):
    """Makes plans that fit if `fits(request)`."""

    def planned(request, folder):
        made = plans.cost() if fits(request) else None
        return plans.plan(made, settings=request.settings)

    monkeypatch.setattr(kept_plans, "load_or_make", planned)


def _told(request, tmp_path, save=False):
    """Returns what the binary tells of a plan."""
    told = []
    commands.plan_model(request, tmp_path, save, told.append)
    return told


def test_the_remedies_follow_a_plan_that_does_not_fit(monkeypatch, tmp_path):
    _plan_if(monkeypatch, lambda request: request.settings)
    text, _, *changes = _told(_request(), tmp_path)
    assert "does NOT fit" in text and len(changes) == 5
    assert changes[2] == (
        "  activations in bfloat16: fits, 9.00 GiB, 500.00 ms a step "
        "(--set=task.activation_dtype=bfloat16)"
    )


def test_executables_are_saved_of_a_plan_that_fits(monkeypatch, tmp_path):
    names = ["train_2"]
    monkeypatch.setattr(trainer_executables, "save", lambda request, folder: names)
    monkeypatch.setattr(own_process, "call", lambda function, request: function(request))
    _plan_if(monkeypatch, lambda request: True)
    assert len(_told(_request(), tmp_path)) == 1
    _, saved = _told(_request(), tmp_path, save=True)
    assert saved.startswith("saved the compiled program train_2 ")
    assert saved.endswith(f"`trainer --executables={tmp_path}/executables` loads it")
    names.append("train_1")
    _, saved = _told(_request(), tmp_path, save=True)
    assert saved.startswith("saved the compiled programs train_2, train_1 ")
    assert saved.endswith(" loads them")
    _plan_if(monkeypatch, lambda request: request.settings)
    with pytest.raises(ValueError, match="--save: nothing was saved, as a step does not fit"):
        _told(_request(), tmp_path, save=True)


def test_decoding_alone_has_no_remedies_and_nothing_to_save(monkeypatch, tmp_path):
    decoding = _request().only(["decode"])
    unfit = plans.without_a_step(decode=plans.program(None))
    monkeypatch.setattr(kept_plans, "load_or_make", lambda *_: unfit)
    (text,) = _told(decoding, tmp_path)
    assert "does NOT fit" in text
    with pytest.raises(ValueError, match="--save saves training steps; expected train among --pr"):
        _told(decoding, tmp_path, save=True)


# A search.


@pytest.fixture
def searched(monkeypatch, tmp_path):
    """Searches with plans of such steps in turn: None does not fit, a text is an error."""

    def search_with(*step_secs):
        left = list(step_secs)
        besides = []

        def planned(request, folder):
            if request.programs != (plan.TRAIN,):
                besides.append(folder.name)
            secs = 0.5 if besides else left.pop(0)
            if isinstance(secs, str):
                raise ValueError(secs)
            made = plans.plan(plans.cost(secs) if secs else None)
            return dataclasses.replace(made, programs=dict.fromkeys(request.programs, made.step))

        told = []
        monkeypatch.setattr(kept_plans, "load_or_make", planned)
        monkeypatch.setattr(commands, "candidates", lambda request: tiny.candidates())
        commands.search_partitioning(_request(_VOCABULARIES), tmp_path, told.append)
        first, *rest = told
        assert first.endswith("candidates fit by the cost model; its best ones, compiled:")
        assert not left and len(besides) == any(isinstance(secs, float) for secs in step_secs)
        return rest[:6], *(text.strip().splitlines() for text in rest[6:])

    return search_with


def test_what_fits_is_ranked_and_the_choice_is_explained(searched):
    refusal = "E=7 is not divisible by 8 partitions\nmore"
    found = [" ".join(each.settings) for each in tiny.candidates()]
    progress, ranking, settings, programs = searched(None, refusal, 0.75, 0.5, 1.0, 1.5)
    assert progress[0] == f"{found[0]}: does not fit, 20.00 of 15.48 GiB"
    assert progress[1] == f"{found[1]}: refused: E=7 is not divisible by 8 partitions"
    assert progress[2].endswith(": fits, 9.00 GiB, 750.00 ms a step")
    head, best, second, *_, agreement, choice = ranking
    assert head.split()[:4] == ["partitioning", "GiB", "step", "ms"]
    assert best.split()[-6:-1] == ["9.00", "500.00", "200.00", "200.00", "100.00"]
    assert second.split()[-5] == "750.00"
    assert set(progress[:2]) < set(ranking)
    assert "over 4 candidates" in agreement
    name = progress[3].partition(": fits")[0]
    assert choice.startswith(f"chosen: {name}: 1.50 times as fast as ")
    given = " ".join(f"--set={each}" for each in (*_VOCABULARIES, *name.split()))
    assert settings == [f"to train so: {given}"]
    # Those of the chosen one alone are compiled.
    assert [line.split()[0] for line in programs[1:5]] == list(plan.PROGRAMS)


def test_nothing_fits(searched):
    _, ranking = searched(*[None] * 6)
    assert ranking[-1] == "chosen: none, for none fits."


@pytest.mark.slow
def test_the_printed_settings_train(searched):
    _, _, (line,), _ = searched(1.0, 1.0, 1.0, 1.0, 1.0, 0.5)
    settings = [word.removeprefix("--set=") for word in line.split() if "--set=" in word]
    params = registry.get_params(_MODEL, settings)
    partitioning = placement.partitioning(params, 8)
    model = TaskModel(params, partitioning)
    p = params.input
    made = Programs(experiment_programs.in_process(params, partitioning))
    rows = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    batch = rows.Transform(lambda spec: np.ones((1, *spec.shape), spec.dtype))
    result = made.get(Mode.TRAIN, rows)(small_task.start_state(model), batch)
    assert int(result.state.step) == 1 and np.isfinite(np.asarray(result.metrics.loss)).all()


# Tables.


def test_machines_without_a_compiler_are_left_out(monkeypatch, tmp_path):
    folders = []

    def load_or_make(request, folder):
        folders.append(folder.name)
        fits = request != "v3:8x8"
        return plans.plan(plans.cost() if fits else None, topology=request)

    monkeypatch.setattr(topology, "is_installed", lambda name: not name.startswith("gb200"))
    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    told = []
    commands.compare_machines(lambda model, name: name, "m4.X", 128, tmp_path, told.append)
    *progress, table = told
    assert progress[:2] == ["v3:8x8: does NOT fit: train", "v4:4x4x4: fits"]
    assert progress[-1] == "gb200:2x64: left out, its compiler is not installed"
    assert folders[:2] == ["v3_8x8", "v4_4x4x4"] and len(folders) == len(progress) - 1
    header, *rows = table.splitlines()
    assert "v3:8x8" in header and "gb200" not in header
    rows = {row.partition("  ")[0]: row.split() for row in rows}
    assert rows["fits"][1:3] == ["0", "1"]
    hours = rows["device-hours for 10^12 tokens"]
    # 10^12 tokens at 2^20 in half a second, on 128 devices.
    assert "-" in hours and float(hours[-2]) == pytest.approx(128e12 / 2**21 / 3600, rel=1e-3)


def test_the_family_is_planned_and_drawn(monkeypatch, tmp_path):
    made = {}
    for run in FAMILY:
        made[run.model] = plans.plan(plans.cost(), cores=run.cores, model=run.model)
    monkeypatch.setattr(kept_plans, "load_or_make", lambda request, folder: made[request])
    told = []
    commands.plan_family(lambda model, topology: model, tmp_path, False, told.append)

    *progress, text = told
    assert progress[0] == "MoE(128E, 12L): fits" and len(progress) == len(FAMILY)
    planned = [PlannedRun(run, made[run.model]) for run in FAMILY]
    assert text == report.family_tables(planned, paper.recomputed(None))
    for name in ("figure_7.png", "figure_8.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_what_is_kept_of_the_family_is_told_and_drawn_without_a_compiler(tmp_path):
    run = FAMILY[0]
    kept = plans.plan(plans.cost(), cores=run.cores, model=run.model)
    plan.save(kept, tmp_path / "kept" / "MoE128E12L")
    told = []
    commands.show_kept_family(tmp_path / "kept", tmp_path / "drawn", told.append)
    assert told == [
        report.family_tables([PlannedRun(run, kept)], paper.recomputed(tmp_path / "kept"))
    ]

    commands.show_paper(tmp_path / "kept", tmp_path / "drawn", told.append)
    # The planned core-years stand beside the printed ones, in Figure 1.
    line = next(line for line in told[1].splitlines() if line.startswith("MoE(128E, 12L)"))
    assert line.split()[-3:] == ["1.9", f"{kept.core_years():.1f}", "-"]
    assert "Without plans of ours" not in told[1]
    drawn = [path.name for path in sorted((tmp_path / "drawn").iterdir())]
    assert drawn == ["figure_1.png", "figure_7.png", "figure_8.png"]


def test_without_the_tpu_compiler_a_line_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(table4, "measure", lambda compile, partitions: [])
    monkeypatch.setattr(topology, "is_installed", lambda name: False)
    told = []
    commands.compile_operators(told.append)
    assert told == [
        "On JAX's own devices",
        "Without TPUs and Figure 4c; `make setup-tpu` installs their compiler.",
    ]


@pytest.mark.parametrize("name", [None, "h100:1x8"])
def test_oneflows_tables_are_told_for_a_topology_too_if_it_is_named(monkeypatch, name):
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


def test_an_unknown_topology_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(sbp, "measure", None)
    with pytest.raises(ValueError, match="topology 'v9:2x2' is unknown"):
        commands.compile_states("v9:2x2", None)


@pytest.mark.parametrize(("over", "column"), [("compile", "8 cores"), ("layers", "12 layers")])
def test_the_growth_with_cores_or_layers_is_told(monkeypatch, over, column):
    made = plans.plan(plans.cost())
    monkeypatch.setattr(compilation_growth, "over_cores", lambda: {"8 cores": made})
    monkeypatch.setattr(compilation_growth, "over_layers", lambda: {"12 layers": made})
    told = []
    commands.compile_growing(over, told.append)
    assert told == [report.compilations_table({column: made})]
