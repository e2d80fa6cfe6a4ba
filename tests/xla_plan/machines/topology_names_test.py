"""What the names of topologies tell before JAX is imported."""

import pytest

from tests.xla_spmd import compilers
from xla_plan.machines import topology, topology_names


def test_the_number_of_devices():
    assert topology_names.num_devices("v3:32x32") == 2048
    assert topology_names.num_devices("v5e:4x8x3slices") == 96
    assert topology_names.num_devices("h100:16x8") == 128


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "v2:2x2",
        "v3:2x4",
        "v4:2x2x4",
        "v5e:2x4",
        "v5e:2x2x2slices",
        "v5p:2x2x1",
        "v6e:2x4",
        "tpu7x:2x2x1",
        "h100:2x8",
        "gb200:1x4",
    ],
)
def test_the_number_of_devices_is_the_compilers(name):
    compilers.need(name)
    assert topology_names.num_devices(name) == len(topology.devices(name))


def test_compared_machines_have_equally_many_devices():
    names = topology_names.compared(128)
    tpus = ["v3:8x8", "v4:4x4x4", "v5e:8x16", "v5p:4x4x8", "v6e:8x16", "tpu7x:4x4x4"]
    assert names[:6] == tpus
    assert names[6:] == ["a100:16x8", "h100:16x8", "h200:16x8", "b200:16x8", "gb200:2x64"]
    assert {topology_names.num_devices(name) for name in names} == {128}


def test_a_pod_has_its_limit_and_a_host_may_be_partly_used():
    assert not any(name.startswith("v6e") for name in topology_names.compared(512))
    assert {"v3:32x32", "gb200:32x64"} <= set(topology_names.compared(2048))
    assert {"v3:2x2", "h100:1x8", "gb200:1x8"} <= set(topology_names.compared(8))
