"""The machines that a model is compared on."""

from lingvo_gshard.plans import kept_plans, machines
from tests.plans import tiny
from tests.xla_plan import samples


def test_each_machine_has_a_folder_and_those_without_a_compiler_have_no_plan(monkeypatch, tmp_path):
    folders = []

    def load_or_make(request, folder):
        folders.append(folder)
        return samples.plan(samples.cost(), topology=request.topology)

    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    told = []
    requests = {"v3:2x2": tiny.request(model="m4.X"), "h100:1x8": None}
    made = machines.plan_machines(requests, tmp_path, told.append)

    assert told == made and folders == [tmp_path / "v3_2x2"]
    assert [machine.topology for machine in made] == ["v3:2x2", "h100:1x8"]
    assert made[0].plan is not None and made[0].plan.topology == "v3:2x2"
    assert made[1].plan is None
