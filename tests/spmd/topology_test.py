"""Programs compiled for TPU topologies, without a TPU.

If libtpu is not installed, the tests that need it check the error message instead.
"""

import importlib.util

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.spmd import functions

_ABSENT = "topology v3:2x2: the TPU compiler is not installed; `make setup-tpu` installs it"
_HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
_EIGHT = functions.partitioning(8)


def test_a_missing_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=_ABSENT):
        topology.devices("v3:2x2")
    exported = lowering.export(functions.sgd_step(), _EIGHT)
    with pytest.raises(ValueError, match=_ABSENT):
        topology.compile_program(exported, "v3:2x2")


def test_an_unknown_name_lists_the_known_ones():
    known = "known are v2:XxY, v3:XxY, .* v4:XxYxZ, .* h100:HOSTSxGPUS, .*; v3:2x2"
    for name in ("", "v3", "v3:8", "v3:0x2", "v3:2x2x2", "v4:4x4", "v1:2x2", "3:2"):
        with pytest.raises(ValueError, match=f"topology '{name}' is unknown; {known}"):
            topology.devices(name)


def test_a_tpu_is_as_near_to_a_square_or_cube_as_possible():
    names = {8: "2x2", 16: "2x4", 128: "8x8", 2048: "32x32"}
    assert {cores: topology.tpu("v3", cores) for cores in names} == {
        cores: f"v3:{name}" for cores, name in names.items()
    }
    assert (topology.tpu("v5p", 128), topology.tpu("v4", 128)) == ("v5p:4x4x8", "v4:4x4x4")
    assert topology.tpu("tpu7x", 8) == "tpu7x:2x2x1"
    for cores in (0, 4, 24):
        with pytest.raises(ValueError, match=f"A TPU pod has 8, 16, 32, ... cores, not {cores}"):
            topology.tpu("v3", cores)


@pytest.mark.slow
def test_a_topologys_program_can_be_read_but_not_run():
    exported = lowering.export(functions.moe_dispatch(_EIGHT), _EIGHT)
    if not _HAS_LIBTPU:
        with pytest.raises(ValueError, match=_ABSENT):
            topology.compile_program(exported, "v3:2x2")
        return
    compiled = topology.compile_program(exported, "v3:2x2")
    assert compiled.report().count("all-to-all") == 2
    assert "num_partitions=8" in compiled.compiled.as_text()
    trees = [functions.randoms(arg, 0) for arg in exported.args]
    with pytest.raises(ValueError, match="moe: compiled for a topology, it can be read but not"):
        compiled(*trees)
    with pytest.raises(ValueError, match="moe: compiled for a topology, it can be read but not"):
        compiled.place("weights", trees[0])


@pytest.mark.slow
def test_what_a_topology_cannot_hold_is_refused():
    def huge(state: NestedMap) -> NestedMap:
        noise = tf.random.stateless_uniform([200, 10**5, 1000], [1, 2], alg="threefry")
        return NestedMap(y=noise + state.x)

    args = (NestedMap(x=TensorSpec((1000,), "float32", "_")),)
    exported = lowering.export(AnnotatedFn("huge", huge, ("state",), args), _EIGHT)
    sixteen = lowering.export(functions.sgd_step(), functions.partitioning(16))
    if not _HAS_LIBTPU:
        with pytest.raises(ValueError, match=_ABSENT):
            topology.compile_program(exported, "v3:2x2")
        return
    with pytest.raises(ValueError, match="program huge: RESOURCE_EXHAUSTED: .* exceeds available"):
        topology.compile_program(exported, "v3:2x2")
    with pytest.raises(ValueError, match="sgd: 16 partitions need as many devices, 8 were found"):
        topology.compile_program(sixteen, "v3:2x2")
    with pytest.raises(ValueError, match='"v3:3x3" is not divisible .*; known are v2:XxY'):
        topology.devices("v3:3x3")
