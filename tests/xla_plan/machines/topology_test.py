"""Programs compiled for TPU topologies, without a TPU.

If libtpu is not installed, the tests that need it check the error message instead.
"""

import importlib.util
import os
import subprocess
import sys
import types

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.spmd import functions
from tests.xla_spmd import compilers
from xla_plan.machines import topology, topology_names

_ABSENT = (
    "topology v3:2x2: the TPU compiler is not installed; `pip install "
    r"'lingvo_gshard\[plan\]'`, or `make setup-tpu` in a checkout, installs it."
)
_HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
_EIGHT = functions.partitioning(8)


def test_a_missing_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=_ABSENT):
        topology.devices("v3:2x2")
    exported = lowering.export(functions.sgd_step(), _EIGHT)
    with pytest.raises(ValueError, match=_ABSENT):
        topology_executable.compile_program(exported, "v3:2x2")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["", "jax.devices()"])
def test_gpus_need_no_libraries_that_compute_on_them(start):
    """Without JAX_PLATFORMS=cpu, JAX leaves out a CUDA plugin that lacks such libraries."""
    compilers.need("h100")
    code = f"""
import jax
from xla_plan.machines import topology
{start}
print(len(topology.devices("h100:1x2")))
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.stdout == "2\n", run.stderr


def test_an_unknown_name_lists_the_known_ones():
    wrong = (
        "v5e:2x2x0slices",
        "v5e:2x2xslices",
        "v5e:2x2x2slice",
        "v5e:2slices",
        "h100:1x8x2slices",
    )
    known = "known are v2:XxY, v3:XxY, v4:XxYxZ, .* h100:HOSTSxGPUS, .*; v3:2x2"
    for name in ("", "v3", "v3:8", "v3:0x2", "v3:2x2x2", "v4:4x4", "v1:2x2", "3:2", *wrong):
        with pytest.raises(ValueError, match=f"topology '{name}' is unknown; {known}"):
            topology.devices(name)


def test_the_number_of_slices():
    names = {"v5e:16x16": 1, "v5e:16x16x4slices": 4, "v5p:2x2x2x32slices": 32, "h100:2x8": 1}
    assert {name: topology.num_slices(name) for name in names} == names


class _Device:
    def __init__(self, slice_index, coords):
        self.slice_index = slice_index
        self.coords = coords


def test_devices_come_slice_by_slice_with_the_places_of_their_slice(monkeypatch):
    described = []

    def description(topology_name, platform, **options):
        described.append((topology_name, platform, options))
        found = [_Device(i % 2, (i // 2, 0, 0)) for i in range(4)]
        return types.SimpleNamespace(devices=found)

    monkeypatch.setattr(topology_names, "is_installed", lambda name: True)
    monkeypatch.setattr(topology.topologies, "get_topology_desc", description)
    assert topology.places("v5e:2x1x2slices") == ((0, 0), (1, 0), (0, 0), (1, 0))
    assert [device.slice_index for device in topology.devices("v5e:2x1x2slices")] == [0, 0, 1, 1]
    assert described[0] == ("v5e:2x1", "tpu", {"num_slices": 2})
    topology.devices("v5e:2x1")
    assert described[-1] == ("v5e:2x1", "tpu", {})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cores"), [("v5e:2x2x2slices", 8), ("v6e:4x4x4slices", 64)])
def test_slices_are_described_and_compiled_for(name, cores):
    """A sum over all devices crosses between slices once, with each device's share."""
    compilers.need(name)
    slices = topology.num_slices(name)
    places = topology.places(name)
    assert len(places) == cores and len(set(places)) == cores // slices

    report = topology_executable.compile_program(
        lowering.export(functions.sgd_step(), functions.partitioning(cores)), name
    ).report()
    per_slice = cores // slices
    between = [
        op for op in report.collective_ops if len({i // per_slice for i in op.groups[0]}) > 1
    ]
    assert between and {op.kind for op in between} == {"all-reduce"}
    assert {op.group_size for op in between} == {slices}


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
            topology_executable.compile_program(exported, "v3:2x2")
        return
    compiled = topology_executable.compile_program(exported, "v3:2x2")
    assert compiled.report().count("all-to-all") == 2
    assert "num_partitions=8" in compiled.compiled.as_text()
    trees = [functions.randoms(arg, 0) for arg in exported.args]
    with pytest.raises(ValueError, match="moe: compiled for a topology, it can be read but not"):
        compiled(*trees)
    with pytest.raises(ValueError, match="moe: compiled for a topology, it can be read but not"):
        compiled.place("weights", trees[0])


@pytest.mark.slow
def test_programs_that_a_topology_cannot_hold_are_refused():
    def huge(state: NestedMap) -> NestedMap:
        noise = tf.random.stateless_uniform([200, 10**5, 1000], [1, 2], alg="threefry")
        return NestedMap(y=noise + state.x)

    args = (NestedMap(x=TensorSpec((1000,), "float32", "_")),)
    exported = lowering.export(AnnotatedFn("huge", huge, ("state",), args), _EIGHT)
    sixteen = lowering.export(functions.sgd_step(), functions.partitioning(16))
    if not _HAS_LIBTPU:
        with pytest.raises(ValueError, match=_ABSENT):
            topology_executable.compile_program(exported, "v3:2x2")
        return
    with pytest.raises(ValueError, match="program huge: RESOURCE_EXHAUSTED: .* exceeds available"):
        topology_executable.compile_program(exported, "v3:2x2")
    with pytest.raises(ValueError, match="sgd: 16 partitions need as many devices, 8 were found"):
        topology_executable.compile_program(sixteen, "v3:2x2")
    with pytest.raises(ValueError, match='"v3:3x3" is not divisible .*; known are v2:XxY'):
        topology.devices("v3:3x3")
