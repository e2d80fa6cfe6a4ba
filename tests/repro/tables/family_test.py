"""Plans of the family, both readings of its batches, and their growth per token."""

import dataclasses

import pytest

from lingvo_gshard import registry
from lingvo_gshard.plans import kept_plans, plan
from lingvo_gshard.plans.request import Request
from lingvo_gshard.sharding.layout import Partitioning
from repro.tables import family
from repro.tables.as_printed import FAMILY
from tests.xla_plan import samples
from xla_plan.plans.program_plan import Batch
from xla_spmd.mesh import Mesh


def _ask(model, topology):
    return Request(
        model, (), registry.get_params(model), topology, Partitioning(Mesh.flat(128), ())
    )


@pytest.fixture
def requested(monkeypatch):
    """Replaces planning by samples; returns each request by its folder."""
    requests = {}

    def load_or_make(request, folder):
        requests[folder] = request
        made = samples.plan(samples.cost(), model=request.model, topology=request.topology)
        samples.save(made, folder)
        return made

    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    return requests


def test_each_model_is_planned_on_its_cores_in_a_separate_folder(requested, tmp_path):
    told = []
    planned = family.plan_family(_ask, tmp_path, False, told.append)

    assert told == planned and [each.run for each in planned] == list(FAMILY)
    assert (planned[0].plan.model, planned[0].plan.topology) == ("m4.MoE128E12L", "v3:8x8")
    assert planned[2].plan.topology == "v3:32x32"
    assert next(iter(requested)) == tmp_path / "MoE128E12L" and len(requested) == len(FAMILY)
    assert {each.half for each in planned} == {None}


def test_the_second_reading_is_the_step_on_half_of_the_rows(requested, tmp_path):
    planned = family.plan_family(_ask, tmp_path, True, lambda _: None)
    request = requested[tmp_path / "half" / "MoE128E12L"]
    assert request.programs == (plan.TRAIN,)
    assert "input.batch_size=2048" in request.settings and request.params.input.batch_size == 2048
    assert all(each.half is not None for each in planned)
    # Stored plans are found again, without a compiler; the dense model lacks one.
    assert family.load_family(tmp_path) == planned


def test_groups_become_no_larger_than_a_cores_tokens():
    params = registry.get_params("m4.MoE128E12L")
    for stack in ("encoder", "decoder"):
        params.task.Get(stack).moe.group_size = 8192  # The tokens of a whole batch on a core.
    request = dataclasses.replace(_ask("m4.MoE128E12L", "v3:8x8"), params=params)
    assert family.half_batch(request).settings == (
        "input.batch_size=2048",
        "task.encoder.moe.group_size=4096",
        "task.decoder.moe.group_size=4096",
    )


def test_a_folder_without_plans_or_with_another_models_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no plan of m4.MoE128E12L or another of the paper"):
        family.load_family(tmp_path)
    samples.save(samples.plan(samples.cost(), model="toy.MoE8E4L"), tmp_path / "MoE512E12L")
    with pytest.raises(ValueError, match="expected a plan of m4.MoE512E12L, got one of toy.MoE8E4"):
        family.load_family(tmp_path)


def test_core_years_of_the_second_reading_count_the_tokens_of_both_sides():
    """On half of the rows, half a second per step gives the rate of a whole batch per second."""
    whole = samples.plan(samples.cost(0.5), batch=Batch(4096, 256, 256))
    half = samples.plan(samples.cost(0.5), batch=Batch(2048, 256, 256))
    assert family.half_core_years(half) == pytest.approx(whole.core_years())


def test_times_are_for_a_token_of_a_core():
    # A core has 8192 tokens. The optimizer takes 0.4 of the 0.45 s outside the network.
    cost = samples.cost(step_secs=0.5, network_secs=0.05)
    times = family.token_times(samples.plan(cost, cores=128))
    assert times.step_secs == pytest.approx(0.5 / 8192)
    assert times.all_to_all_secs == pytest.approx(0.05 / 8192)
    assert times.all_to_all_share == pytest.approx(0.05 / (0.6 * 0.45 + 0.05))
