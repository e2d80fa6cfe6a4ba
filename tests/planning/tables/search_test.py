"""Candidates that are compiled, and their ranking."""

import dataclasses

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import commands, kept_plans, plan
from lingvo_gshard.planning.estimate.candidates import Candidate
from lingvo_gshard.planning.plan import Times
from lingvo_gshard.planning.request import Request
from lingvo_gshard.planning.tables import report, search
from lingvo_gshard.runs import experiment_programs
from lingvo_gshard.train.programs import Programs
from tests.layers import building
from tests.planning import plans

_MODEL = "toy.MoE8E4L"
_VOCABULARIES = ("task.source_vocab_size=64", "task.target_vocab_size=64")
_TABLES = (
    ("mesh=experts:8", "sharding=BG:experts,E:experts"),
    ("mesh=data:8", "sharding=BG:data"),
    ("mesh=data:8", "sharding=BG:data,m:data"),
    ("mesh=data:4,model:2", "sharding=BG:data,HNV:model"),
    ("mesh=data:2,experts:4", "sharding=BG:data+experts,E:experts"),
    ("mesh=experts:4,model:2", "sharding=BG:experts,E:experts,HNV:model"),
)
_CANDIDATES = [
    Candidate((*table, f"task.encoder.remat={remat}"), 0.1 * i)
    for i, table in enumerate(_TABLES)
    for remat in ("NONE", "BLOCK")
]


def _request():
    params = registry.get_params(_MODEL, _VOCABULARIES)
    return Request(_MODEL, _VOCABULARIES, params, "v3:2x2", placement.partitioning(params, 8))


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
        monkeypatch.setattr(commands, "candidates", lambda request: _CANDIDATES)
        commands.search_partitioning(_request(), tmp_path, told.append)
        first, *rest = told
        assert first.endswith("candidates fit by the cost model; its best ones, compiled:")
        assert not left and len(besides) == any(isinstance(secs, float) for secs in step_secs)
        return rest[:6], *(text.strip().splitlines() for text in rest[6:])

    return search_with


def test_what_fits_is_ranked_and_the_choice_is_explained(searched):
    refusal = "E=7 is not divisible by 8 partitions\nmore"
    found = [" ".join(each.settings) for each in _CANDIDATES]
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


def test_one_of_each_mesh_and_table_that_fits_is_compiled(searched):
    progress, *_ = searched(*[0.5] * 6)
    assert len({tuple(line.split()[:2]) for line in progress}) == 6


def test_nothing_fits(searched):
    _, ranking = searched(*[None] * 6)
    assert ranking[-1] == "chosen: none, for none fits."


def test_the_agreement_of_estimated_and_compiled_steps():
    agreement = search.agreement([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0)])
    assert agreement.num_candidates == 3 and agreement.rank_correlation == pytest.approx(0.5)
    assert report.agreement_line(agreement) == (
        "the cost model's steps: 0.50 to 2.00 of the compiled ones, rank correlation 0.50 over 3 "
        "candidates"
    )


def test_the_gain_is_that_of_the_resource_where_most_is_saved():
    best = Times(compute=0.2, memory=0.5, network=0.1, step=0.6)
    second = Times(compute=0.2, memory=0.4, network=0.5, step=0.9)
    gain = search.gain(best, second)
    assert gain.resource == "network"
    assert gain.times_as_fast == pytest.approx(1.5) and gain.saved_secs == pytest.approx(0.4)


@pytest.mark.slow
def test_the_printed_settings_train(searched):
    _, _, (line,), _ = searched(1.0, 1.0, 1.0, 1.0, 1.0, 0.5)
    settings = [word.removeprefix("--set=") for word in line.split() if "--set=" in word]
    params = registry.get_params(_MODEL, settings)
    partitioning = placement.partitioning(params, 8)
    model = TranslationModel(params, partitioning)
    p = params.input
    made = Programs(experiment_programs.in_process(params, partitioning))
    rows = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    batch = rows.Transform(lambda spec: np.ones((1, *spec.shape), spec.dtype))
    state = NestedMap(
        step=np.int32(0),
        theta=building.random_theta(model.task),
        slots=model.state_spec.slots.Transform(lambda spec: np.zeros(spec.shape, np.float32)),
    )
    result = made.get(Mode.TRAIN, rows)(state, batch)
    assert int(result.state.step) == 1 and np.isfinite(np.asarray(result.metrics.loss)).all()
