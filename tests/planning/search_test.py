"""Candidate partitionings, those that are compiled, and their ranking."""

import dataclasses
import itertools

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import ModeKeys
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import hardware, plan, planner, search
from lingvo_gshard.planning.planner import Request
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import topology
from lingvo_gshard.train import steps
from tests.layers import building
from tests.planning import plans

_MODEL = "toy.MoE8E4L"
_VOCABULARIES = ("task.source_vocab_size=64", "task.target_vocab_size=64")
_SIZES = {"B": 128, "G": 2048, "E": 128, "M": 1024, "H": 8192, "N": 16, "V": 32_000}


def _request(*settings, model=_MODEL):
    settings = (*_VOCABULARIES, *settings)
    params = registry.get_params(model, settings)
    return Request(model, settings, params, "v3:2x2", placement.partitioning(params, 8))


@pytest.fixture(scope="module", autouse=True)
def _on_eight_cores():
    """The places of v3:2x2, without the TPU's library."""
    chips = itertools.product(range(2), range(2))
    places = tuple(chip for chip in chips for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "places", lambda name: places)
        yield


@pytest.fixture(scope="module")
def candidates():
    return search.candidates(_request())


def _layouts(cores, **sizes):
    return list(search.layouts({**_SIZES, **sizes}, cores))


def _ways(layout, cores, letters):
    mesh, sharding = (setting.partition("=")[2] for setting in layout)
    parts = Partitioning.parse(Mesh.parse(mesh, cores), sharding)
    return {letter: parts.factor(letter)[0] for letter in letters}


@pytest.mark.parametrize(
    ("mesh", "sharding"),
    [
        ("experts:128", "BG:experts,E:experts"),  # The paper's.
        ("data:128", "BG:data"),
        ("data:128", "BG:data,m:data"),  # ZeRO-2
        ("data:128", "BG:data,M:data"),  # ZeRO-3
        ("data:16,experts:8", "BG:data+experts,E:experts"),
        ("data:8,model:16", "BG:data,HNV:model"),  # Megatron
        ("data:8,model:16", "BG:data,EHNV:model"),
        ("data:2,experts:8,model:8", "BG:data+experts,E:experts,HNV:model,m:data+experts"),
    ],
)
def test_the_partitionings_of_the_literature_are_among_the_candidates(mesh, sharding):
    assert (f"mesh={mesh}", f"sharding={sharding}") in _layouts(128)


@pytest.mark.parametrize("sizes", [{}, {"E": 1}, {"B": 8, "V": 1001, "N": 3, "M": 12}])
@pytest.mark.parametrize("cores", [8, 12, 128])
def test_every_candidate_uses_all_cores_and_divides_all_sizes(cores, sizes):
    found = _layouts(cores, **sizes)
    assert len(set(found)) == len(found)
    for layout in found:
        for letter, ways in _ways(layout, cores, _SIZES).items():
            assert {**_SIZES, **sizes}[letter] % ways == 0, layout


def test_a_dense_model_has_no_experts_to_place():
    assert not any("E" in sharding for _, sharding in _layouts(128, E=1))


def test_what_cannot_divide_leaves_no_candidate():
    assert not _layouts(7)


def test_candidates_are_those_that_fit_the_fastest_first(monkeypatch, candidates):
    assert [each.secs for each in candidates] == sorted(each.secs for each in candidates)
    assert len({each.settings for each in candidates}) == len(candidates) > 50
    small = dataclasses.replace(hardware.GENERATIONS["v3"], capacity_gib=0.06)
    monkeypatch.setitem(hardware.GENERATIONS, "v3", small)
    tight = {each.settings for each in search.candidates(_request())}
    assert tight < {each.settings for each in candidates}
    data_parallel = [each for each in tight if each[1] == "sharding=BG:data"]
    assert data_parallel == []  # All weights on every core.


def test_a_batch_of_another_program_limits_the_candidates():
    def widest(request):
        found = search.candidates(request)
        return max(_ways(each.settings[:2], 8, "B")["B"] for each in found)

    request = _request("decode.batch_size=2")
    assert widest(request) == 2 < widest(request.step_only())


def test_no_candidate_fits(monkeypatch):
    small = dataclasses.replace(hardware.GENERATIONS["v3"], capacity_gib=0.001)
    monkeypatch.setitem(hardware.GENERATIONS, "v3", small)
    with pytest.raises(ValueError, match="--search: no mesh of 8 devices divides the model and"):
        search.candidates(_request())


@pytest.fixture
def searched(monkeypatch, tmp_path, candidates):
    """Searches with plans of such steps in turn: None does not fit, a text is an error."""

    def search_with(*step_secs):
        left, besides = list(step_secs), []

        def planned(request, folder):
            if request.programs != (plan.TRAIN,):
                besides.append(folder.name)
            secs = 0.5 if besides else left.pop(0)
            if isinstance(secs, str):
                raise ValueError(secs)
            made = plans.plan(plans.cost(secs) if secs else None)
            return dataclasses.replace(made, programs=dict.fromkeys(request.programs, made.step))

        monkeypatch.setattr(planner, "planned", planned)
        monkeypatch.setattr(search, "candidates", lambda request: candidates)
        first, *rest = search.search_lines(_request(), tmp_path)
        assert first.endswith("candidates fit by the cost model; its best ones, compiled:")
        assert not left and len(besides) == any(isinstance(secs, float) for secs in step_secs)
        return rest[:6], *(text.strip().splitlines() for text in rest[6:])

    return search_with


def test_what_fits_is_ranked_and_the_choice_is_explained(searched, candidates):
    refusal = "E=7 is not divisible by 8 partitions\nmore"
    found = [" ".join(each.settings) for each in candidates]
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
    text = search.agreement([(1.0, 2.0), (2.0, 1.0), (3.0, 3.0)])
    assert text == (
        "the cost model's steps: 0.50 to 2.00 of the compiled ones, rank correlation 0.50 over 3 "
        "candidates"
    )


@pytest.mark.slow
def test_the_printed_settings_train(searched):
    _, _, (line,), _ = searched(1.0, 1.0, 1.0, 1.0, 1.0, 0.5)
    settings = [word.removeprefix("--set=") for word in line.split() if "--set=" in word]
    params = registry.get_params(_MODEL, settings)
    parts = placement.partitioning(params, 8)
    model = TranslationModel(params, parts)
    p = params.input
    made = steps.Programs(model.model_fn, params, parts, model.state_spec)
    rows = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    batch = rows.Transform(lambda spec: np.ones((1, *spec.shape), spec.dtype))
    state = NestedMap(
        step=np.int32(0),
        theta=building.random_theta(model.task),
        slots=model.state_spec.slots.Transform(lambda spec: np.zeros(spec.shape, np.float32)),
    )
    result = made.get(ModeKeys.TRAIN, rows)(state, batch)
    assert int(result.state.step) == 1 and np.isfinite(np.asarray(result.metrics.loss)).all()
