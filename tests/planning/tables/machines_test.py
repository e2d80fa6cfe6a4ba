"""The machines that a model is compared on."""

import pytest

from lingvo_gshard.planning import commands, kept_plans
from lingvo_gshard.planning.tables import machines
from lingvo_gshard.spmd import topology
from tests.planning import plans


def test_each_has_as_many_devices():
    found = machines.topologies(128)
    tpus = ["v3:8x8", "v4:4x4x4", "v5e:8x16", "v5p:4x4x8", "v6e:8x16", "tpu7x:4x4x4"]
    assert found[:6] == tpus
    assert found[6:] == ["a100:16x8", "h100:16x8", "h200:16x8", "b200:16x8", "gb200:2x64"]


def test_a_pod_has_its_limit_and_a_host_may_be_partly_used():
    assert not any(name.startswith("v6e") for name in machines.topologies(512))
    assert {"v3:32x32", "gb200:32x64"} <= set(machines.topologies(2048))
    assert {"v3:2x2", "h100:1x8", "gb200:1x8"} <= set(machines.topologies(8))


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
