"""The machines that a model is compared on."""

from lingvo_gshard.plans import kept_plans, machines
from tests.plans import tiny
from tests.xla_plan import samples
from xla_plan.machines import topology


def test_each_has_as_many_devices():
    found = machines.topologies(128)
    tpus = ["v3:8x8", "v4:4x4x4", "v5e:8x16", "v5p:4x4x8", "v6e:8x16", "tpu7x:4x4x4"]
    assert found[:6] == tpus
    assert found[6:] == ["a100:16x8", "h100:16x8", "h200:16x8", "b200:16x8", "gb200:2x64"]


def test_a_pod_has_its_limit_and_a_host_may_be_partly_used():
    assert not any(name.startswith("v6e") for name in machines.topologies(512))
    assert {"v3:32x32", "gb200:32x64"} <= set(machines.topologies(2048))
    assert {"v3:2x2", "h100:1x8", "gb200:1x8"} <= set(machines.topologies(8))


def test_each_machine_has_a_folder_and_those_without_a_compiler_have_no_plan(monkeypatch, tmp_path):
    folders = []

    def load_or_make(request, folder):
        folders.append(folder)
        return samples.plan(samples.cost(), topology=request.topology)

    monkeypatch.setattr(topology, "is_installed", lambda name: name.startswith("v3"))
    monkeypatch.setattr(kept_plans, "load_or_make", load_or_make)
    told = []

    def ask(model, name):
        return tiny.request(model=model, topology=name)

    made = machines.plan_machines(ask, "m4.X", 8, tmp_path, told.append)

    assert told == made and folders == [tmp_path / "v3_2x2"]
    assert [machine.topology for machine in made] == machines.topologies(8)
    assert made[0].plan is not None and made[0].plan.topology == "v3:2x2"
    assert all(machine.plan is None for machine in made[1:])
