"""CPU devices in place of a TPU's topology."""

import pytest

from lingvo_gshard.spmd import topology
from lingvo_gshard.spmd.executable import compile_program
from tests.planning import tiny

_COMPILE_PROGRAM = topology.compile_program
_PLACES = topology.places


@pytest.fixture(scope="module")
def cpu():
    """Puts the devices at hand in a topology's place; returns the list of compiled programs."""
    compiled = []

    def compile_here(exported, name):
        assert name == tiny.TOPOLOGY
        compiled.append(compile_program(exported))
        return compiled[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "compile_program", compile_here)
        patch.setattr(topology, "places", lambda name: tiny.PLACES)
        yield compiled


@pytest.fixture
def tpu(monkeypatch):
    """Restores the TPU compiler, which `cpu` replaces for the whole module."""
    monkeypatch.setattr(topology, "compile_program", _COMPILE_PROGRAM)
    monkeypatch.setattr(topology, "places", _PLACES)
