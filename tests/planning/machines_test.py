"""The machines that a model is compared on."""

from lingvo_gshard.planning import machines


def test_each_has_as_many_devices():
    found = machines.topologies(128)
    tpus = ["v3:8x8", "v4:4x4x4", "v5e:8x16", "v5p:4x4x8", "v6e:8x16", "tpu7x:4x4x4"]
    assert found[:6] == tpus
    assert found[6:] == ["a100:16x8", "h100:16x8", "h200:16x8", "b200:16x8", "gb200:2x64"]


def test_a_pod_has_its_limit_and_a_host_may_be_partly_used():
    assert not any(name.startswith("v6e") for name in machines.topologies(512))
    assert {"v3:32x32", "gb200:32x64"} <= set(machines.topologies(2048))
    assert {"v3:2x2", "h100:1x8", "gb200:1x8"} <= set(machines.topologies(8))
