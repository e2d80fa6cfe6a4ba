"""The text that `plan` prints for its flags, from plans made by hand."""

import dataclasses

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.input import packing
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import commands, kept_plans, plan, trainer_executables
from lingvo_gshard.plans.request import Request
from lingvo_gshard.train.programs import Programs
from tests.model import small_task
from tests.plans import tiny
from tests.repro.published import published_steps
from tests.repro.published.published_steps import record
from tests.xla_plan import samples
from xla_plan.expected import factors
from xla_plan.machines import topology_names
from xla_plan.plans import own_process

_MODEL = "toy.MoE8E4L"
_VOCABULARIES = ("task.source_vocab_size=64", "task.target_vocab_size=64")


def _request(settings=()):
    params = registry.get_params(_MODEL, settings)
    return Request(_MODEL, settings, params, "v3:2x2", placement.partitioning(params, 8))


# A plan, and the changes that would make it fit.


def _plan_if(monkeypatch, fits):
    """Makes plans that fit if `fits(request)`."""

    def planned(request, folder):
        made = samples.cost() if fits(request) else None
        return samples.plan(made, settings=request.settings)

    monkeypatch.setattr(kept_plans, "load_or_make", planned)


def _told(request, tmp_path, save=False):
    """Returns the text that the command prints about a plan."""
    told = []
    commands.plan_model(request, tmp_path, save, told.append)
    return told


def test_the_remedies_follow_a_plan_that_does_not_fit(monkeypatch, tmp_path):
    _plan_if(monkeypatch, lambda request: request.settings)
    text, _, *changes = _told(_request(), tmp_path)
    assert "does NOT fit" in text and len(changes) == 5
    assert changes[2] == (
        "  activations in bfloat16: fits, 9.00 GiB, 500 ms a step "
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


def test_a_plan_of_only_decoding_has_no_remedies(monkeypatch, tmp_path):
    decoding = _request().only(["decode"])
    unfit = samples.without_a_step(decode=samples.program(None))
    monkeypatch.setattr(kept_plans, "load_or_make", lambda *_: unfit)
    (text,) = _told(decoding, tmp_path)
    assert "does NOT fit" in text


# A search.


@pytest.fixture
def searched(monkeypatch, tmp_path):
    """Searches with plans of these steps in turn; None does not fit, and a text is an error."""

    def search_with(*step_secs):
        left = list(step_secs)
        besides = []

        def planned(request, folder):
            if request.programs != (plan.TRAIN,):
                besides.append(folder.name)
            secs = 0.5 if besides else left.pop(0)
            if isinstance(secs, str):
                raise ValueError(secs)
            made = samples.plan(samples.cost(secs) if secs else None)
            programs = {
                name: dataclasses.replace(made.step, name=name) for name in request.programs
            }
            return dataclasses.replace(made, programs=programs)

        told = []
        monkeypatch.setattr(kept_plans, "load_or_make", planned)
        monkeypatch.setattr(commands, "candidates", lambda request: tiny.candidates())
        commands.search_partitioning(_request(_VOCABULARIES), tmp_path, told.append)
        first, *rest = told
        assert first.endswith("candidates fit by the cost model; its best ones, compiled:")
        assert not left and len(besides) == any(isinstance(secs, float) for secs in step_secs)
        return rest[:6], *(text.strip().splitlines() for text in rest[6:])

    return search_with


def test_fitting_candidates_are_ranked_and_the_choice_is_explained(searched):
    refusal = "E=7 is not divisible by 8 partitions\nmore"
    found = [" ".join(each.settings) for each in tiny.candidates()]
    progress, ranking, settings, programs = searched(None, refusal, 0.75, 0.5, 1.0, 1.5)
    assert progress[0] == f"{found[0]}: does not fit, 20.00 of 15.48 GiB"
    assert progress[1] == f"{found[1]}: refused: E=7 is not divisible by 8 partitions"
    assert ": fits, 9.00 GiB, 750 ms a step, " in progress[2]
    head, best, second, *_, agreement, choice = ranking
    assert head.split()[:4] == ["partitioning", "GiB", "step", "ms"]
    assert best.split()[-6:-1] == ["9.00", "500", "200", "200", "100"]
    assert second.split()[-5] == "750"
    assert set(progress[:2]) < set(ranking)
    assert "over 4 candidates" in agreement
    name = progress[3].partition(": fits")[0]
    assert choice.startswith(f"chosen: {name}: 1.50 times as fast as ")
    given = " ".join(f"--set={each}" for each in (*_VOCABULARIES, *name.split()))
    assert settings == [f"to train so: {given}"]
    # Only the chosen candidate's programs are compiled.
    assert [line.split()[0] for line in programs[1:5]] == list(plan.PROGRAMS)


def test_nothing_fits(searched):
    _, ranking = searched(*[None] * 6)
    assert ranking[-1] == "chosen: nothing fits."


@pytest.mark.slow
def test_the_printed_settings_train(searched):
    _, _, (line,), _ = searched(1.0, 1.0, 1.0, 1.0, 1.0, 0.5)
    settings = [word.removeprefix("--set=") for word in line.split() if "--set=" in word]
    params = registry.get_params(_MODEL, settings)
    partitioning = placement.partitioning(params, 8)
    model = TaskModel(params, partitioning)
    p = params.input
    made = Programs(model, in_process=True)
    rows = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    batch = rows.Transform(lambda spec: np.ones((1, *spec.shape), spec.dtype))
    result = made.get(Mode.TRAIN, rows)(small_task.start_state(model), batch)
    assert int(result.state.step) == 1 and np.isfinite(np.asarray(result.metrics.loss)).all()


# Machines.


def test_machines_without_a_compiler_are_left_out(monkeypatch, tmp_path):
    folders = []

    def load_or_make(request, folder):
        folders.append(folder.name)
        fits = request.topology != "v3:8x8"
        return samples.plan(samples.cost() if fits else None, topology=request.topology)

    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    told = []

    requests = {name: tiny.request(topology=name) for name in topology_names.compared(128)}
    requests["gb200:2x64"] = None
    commands.compare_machines(requests, tmp_path, told.append)
    *progress, table = told
    assert progress[:2] == ["v3:8x8: does NOT fit: train", "v4:4x4x4: fits"]
    assert progress[-1] == "gb200:2x64: left out, its compiler is not installed"
    assert folders[:2] == ["v3_8x8", "v4_4x4x4"] and len(folders) == len(progress) - 1
    header = table.splitlines()[0]
    assert "v3:8x8" in header and "gb200" not in header


def test_machines_are_columns(monkeypatch, tmp_path):
    path = published_steps.write(tmp_path / "bounds.json", record("a", 0.5, "v4"))
    monkeypatch.setattr(factors, "BOUNDS", path)

    def load_or_make(request, folder):
        fits = request.topology != "v3:8x8"
        return samples.plan(samples.cost() if fits else None, topology=request.topology)

    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    requests = {name: tiny.request(topology=name) for name in ("v3:8x8", "v4:4x4x4")}
    told = []
    commands.compare_machines(requests, tmp_path, told.append)

    header, *lines = told[-1].splitlines()
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
