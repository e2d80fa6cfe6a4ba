"""CPU devices in place of a TPU's topology."""

import pytest

from lingvo_gshard.plans import topology_executable
from lingvo_gshard.spmd.executable import compile_program
from tests.plans import tiny
from xla_plan.machines import topology

_COMPILE_PROGRAM = topology_executable.compile_program
_PLACES = topology.places


@pytest.fixture(scope="module")
def cpu():
    """Replaces a topology by the devices at hand; returns the list of compiled programs."""
    compiled = []

    def compile_here(exported, name):
        assert name == tiny.TOPOLOGY
        compiled.append(compile_program(exported))
        return compiled[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology_executable, "compile_program", compile_here)
        patch.setattr(topology, "places", lambda name: tiny.PLACES)
        yield compiled


@pytest.fixture
def tpu(monkeypatch):
    """Restores the TPU compiler, which `cpu` replaces for the whole module."""
    monkeypatch.setattr(topology_executable, "compile_program", _COMPILE_PROGRAM)
    monkeypatch.setattr(topology, "places", _PLACES)
