"""Plans of the family, their growth by the token, and the model of Figure 9."""

import dataclasses

import pytest

from lingvo_gshard.planning import kept_plans
from lingvo_gshard.planning.tables import table3_and_figures_7_to_9
from lingvo_gshard.planning.tables.table3_as_printed import FAMILY
from tests.planning import plans


def test_each_model_is_planned_on_its_cores_in_a_folder_of_its_own(monkeypatch, tmp_path):
    folders = []

    def load_or_make(request, folder):
        folders.append(folder)
        model, topology = request
        return plans.plan(None, model=model, topology=topology)

    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    told = []
    family = table3_and_figures_7_to_9.plan_family(
        lambda model, topology: (model, topology), tmp_path, told.append
    )

    assert told == family and [planned.run for planned in family] == list(FAMILY)
    assert (family[0].plan.model, family[0].plan.topology) == ("m4.MoE128E12L", "v3:8x8")
    assert family[2].plan.topology == "v3:32x32"
    assert folders[0] == tmp_path / "MoE128E12L" and len(set(folders)) == len(FAMILY)


def test_times_are_for_a_token_of_a_core():
    # 8192 tokens a core; of 0.45 s that are not the network, the optimizer takes 0.4.
    cost = plans.cost(step_secs=0.5, network_secs=0.05)
    times = table3_and_figures_7_to_9.token_times(plans.plan(cost, cores=128))
    assert times.step_secs == pytest.approx(0.5 / 8192)
    assert times.all_to_all_secs == pytest.approx(0.05 / 8192)
    assert times.all_to_all_share == pytest.approx(0.05 / (0.6 * 0.45 + 0.05))


def test_a_dense_model_exchanges_nothing_and_one_that_does_not_fit_has_no_times():
    dense = dataclasses.replace(plans.cost(), network_secs_by_kind={})
    times = table3_and_figures_7_to_9.token_times(plans.plan(dense))
    assert times.all_to_all_secs == times.all_to_all_share == 0.0
    assert table3_and_figures_7_to_9.token_times(plans.plan(None)) is None


def test_figure_9_has_a_point_for_each_collective_and_number_of_cores():
    points = list(table3_and_figures_7_to_9.figure_9())
    assert {point.cores for point in points} == {16, 32, 64, 128, 256, 512, 1024, 2048}
    assert len(points) == 8 * 2 * 2
    least, most = (point.secs for point in points[:2])  # 8 and 32 MiB.
    assert most == pytest.approx(4 * least)


@pytest.mark.parametrize("mib", [8, 32])
def test_the_model_of_figure_9_grows_as_the_paper_measured(mib):
    secs = {}
    for point in table3_and_figures_7_to_9.figure_9():
        if point.mib == mib:
            secs[point.kind, point.cores] = point.secs
    growth = {kind: secs[kind, 2048] / secs[kind, 16] for kind in ("all-to-all", "all-reduce")}
    assert growth["all-to-all"] == pytest.approx(9.0, rel=0.3)  # As printed.
    assert growth["all-reduce"] == pytest.approx(1.0, abs=0.25)
