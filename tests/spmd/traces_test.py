"""Reading traces of a GPU and a TPU, handmade in the form of real traces."""

import types

import jax
import pytest

from lingvo_gshard.spmd import traces
from lingvo_gshard.spmd.traces import InstructionRun, Interval


def _event(name, start_ns, end_ns, **stats):
    return types.SimpleNamespace(name=name, start_ns=start_ns, end_ns=end_ns, stats=stats.items())


def _plane(name, **lines):
    return types.SimpleNamespace(
        name=name,
        lines=[types.SimpleNamespace(name=line, events=events) for line, events in lines.items()],
    )


@pytest.fixture
def read(monkeypatch):
    """Returns a function that reads a trace of some planes."""

    def read_planes(*planes):
        data = types.SimpleNamespace(planes=planes)
        profile_data = types.SimpleNamespace(from_file=lambda path: data)
        monkeypatch.setattr(jax.profiler, "ProfileData", profile_data)
        return traces.read("x.xplane.pb")

    return read_planes


def test_gpus_run_kernels_on_streams(read):
    trace = read(
        _plane("/host:CPU", python=[_event("train", 0, 90, step_num=7), _event("train", 5, 6)]),
        _plane(
            "/device:GPU:1",
            **{
                "Stream #13(Compute)": [_event("nvjet_sm90", 10, 20, hlo_op="fusion.3")],
                "Stream #14(MemcpyD2D)": [_event("MemcpyD2D", 20, 30)],
                "XLA Modules": [_event("jit_call(1)", 10, 30, hlo_module="jit_call")],
            },
        ),
        _plane("/device:CUSTOM:Megascale Trace"),
    )
    assert trace.calls == {7: Interval(0, 90)}
    assert trace.runs == (InstructionRun(1, "fusion.3", 10, 20), InstructionRun(1, "", 20, 30))


def test_tpus_name_instructions_by_their_text(read):
    events = [_event("%all-reduce.5 = f32[8]{0} all-reduce(f32[8]{0} %x)", 10, 20)]
    trace = read(_plane("/device:TPU:0", **{"XLA Ops": events, "Steps": [_event("7", 0, 90)]}))
    assert trace.runs == (InstructionRun(0, "all-reduce.5", 10, 20),)
