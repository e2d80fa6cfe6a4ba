"""Candidate partitionings."""

import dataclasses
import itertools

import pytest

from lingvo_gshard import registry
from lingvo_gshard.model import placement
from lingvo_gshard.plans import candidates
from lingvo_gshard.plans.request import Request
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from xla_plan.machines import hardware, topology
from xla_spmd.mesh import Mesh

_SIZES = {"B": 128, "G": 2048, "E": 128, "M": 1024, "H": 8192, "N": 16, "V": 32_000, "R": 8}
_STACKS = ("encoder", "decoder")
_LOOPS = tuple(f"task.{stack}.layers_as=LOOP" for stack in _STACKS)


def _request(*settings, model="toy.MoE8E4L"):
    settings = ("task.source_vocab_size=64", "task.target_vocab_size=64", *settings)
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
def found():
    return candidates.candidates(_request())


def _layouts(cores, **sizes):
    return list(candidates.layouts({**_SIZES, **sizes}, _STACKS, cores))


def _ways(layout, cores, letters):
    mesh, sharding = (setting.partition("=")[2] for setting in layout)
    parts = Partitioning.parse(Mesh.parse(mesh, cores), sharding)
    return {letter: parts.factor(letter)[0] for letter in letters}


@pytest.mark.parametrize(
    ("mesh", "sharding"),
    [
        ("experts:128", "BG:experts,E:experts"),  # The paper's.
        ("data:128", "BG:data,m:data"),  # ZeRO-2
        ("data:128", "BG:data,M:data"),  # ZeRO-3
        ("data:16,experts:8", "BG:data+experts,E:experts"),
        ("data:8,model:16", "BG:data,HNV:model"),  # Megatron
        ("data:2,experts:8,model:8", "BG:data+experts,E:experts,HNV:model,m:data+experts"),
        ("data:128", "BG:data,V:data,U:-"),  # One weird trick: the softmax differs.
        ("data:8,model:16", "BG:data,HNV:model,encoder.BG:data+model,encoder.HN:-"),
        ("data:8,model:16", "BG:data,HNV:model,M:model,weights.M:data"),  # 2-D products
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


def test_every_stack_divides_its_sizes():
    for mesh, sharding in _layouts(8, B=4, M=12):
        table = sharding.partition("=")[2]
        parts = Partitioning.parse(Mesh.parse(mesh.partition("=")[2], 8), table)
        for stack in _STACKS:
            rows, weights = parts.in_stack(stack).factor("B"), parts.in_stack(stack).factor("MH")
            assert 4 % rows[0] == 0 and 12 % weights[0] == 0, sharding


@pytest.mark.slow
def test_split_updates_are_tried_with_and_without_scattered_gradients(found):
    zero_1 = [each for each in found if "train.scatter_gradients=False" in each.settings]
    assert zero_1 and all("m:" in each.settings[1] for each in zero_1)
    others = {each.settings for each in found}
    for each in zero_1:
        zero_2 = [s for s in each.settings if not s.startswith("train.")]
        assert tuple(zero_2) in others


def test_a_dense_model_has_no_experts_to_place():
    assert not any("E" in sharding for _, sharding in _layouts(128, E=1))


def test_seven_cores_have_no_candidate():
    assert not _layouts(7)


@pytest.mark.slow
def test_fitting_candidates_are_sorted_by_speed(monkeypatch, found):
    assert [each.secs for each in found] == sorted(each.secs for each in found)
    assert len({each.settings for each in found}) == len(found) > 50
    small = dataclasses.replace(hardware.GENERATIONS["v3"], capacity_gib=0.06)
    monkeypatch.setitem(hardware.GENERATIONS, "v3", small)
    tight = {each.settings for each in candidates.candidates(_request())}
    assert tight < {each.settings for each in found}
    data_parallel = [each for each in tight if each[1] == "sharding=BG:data"]
    assert data_parallel == []  # All weights on every core.


@pytest.mark.slow
def test_a_batch_of_another_program_limits_the_candidates():
    def widest(request):
        found = candidates.candidates(request)
        return max(_ways(each.settings[:2], 8, "B")["B"] for each in found)

    request = _request("decode.batch_size=2")
    assert widest(request) == 2 < widest(request.step_only())


@pytest.mark.slow
def test_no_candidate_fits(monkeypatch):
    small = dataclasses.replace(hardware.GENERATIONS["v3"], capacity_gib=0.001)
    monkeypatch.setitem(hardware.GENERATIONS, "v3", small)
    with pytest.raises(ValueError, match="no mesh of 8 devices divides the model and"):
        candidates.candidates(_request())


def _in_stages(request):
    return [each for each in candidates.candidates(request) if "stages" in each.settings[0]]


@pytest.mark.slow
def test_a_loop_of_dense_layers_may_be_a_pipeline():
    request = _request(*_LOOPS, model="toy.Dense4L")
    staged = _in_stages(request)
    assert staged and {each.settings[0] for each in staged} >= {"mesh=data:4,stages:2"}
    for each in staged:
        params = request.changed(each.settings).params
        placement.check_divisible(params, request.changed(each.settings).partitioning)
        for stack in map(params.task.Get, _STACKS):
            one = Annotator(Partitioning(Mesh.flat(1), ()))
            stack.Copy().Set(dim=params.task.dim).Instantiate(one)  # It refuses wrong stages.
            assert stack.stages == 2 <= stack.microbatches and 32 % stack.microbatches == 0


@pytest.mark.slow
def test_microbatches_leave_no_stage_without_rows():
    staged = _in_stages(_request(*_LOOPS, "input.batch_size=8", model="toy.Dense4L"))
    assert {each.settings[0] for each in staged} == {
        "mesh=data:2,model:2,stages:2",
        "mesh=data:4,stages:2",
        "mesh=model:4,stages:2",
    }
    rows = {each.settings[0]: 8 // (4 if "data:4" in each.settings[0] else 1) for each in staged}
    for each in staged:
        assert rows[each.settings[0]] % int(each.settings[-1].rpartition("=")[2]) == 0


@pytest.mark.slow
def test_models_without_pipelines_have_no_stages(found):
    assert not any("stages" in each.settings[0] for each in found)
    assert not _in_stages(_request(*_LOOPS, "task.encoder.moe.dispatch=GATHER"))
