"""The table of a profile, as a user reads it."""

import pathlib
import types

import pytest

from lingvo_gshard.plans import measured_step, profile
from lingvo_gshard.plans.measured_step import MeasuredStep, Part
from lingvo_gshard.spmd import traces
from lingvo_gshard.train.profiling import Profile, ProfiledCall
from xla_plan.machines import networks


@pytest.fixture
def told(monkeypatch):
    """Returns the text of steps 3 to 6, on a machine with a network or without."""

    def text(asked, network, dispatch=None):
        roofline_secs = None if network is None else 0.004
        parts = {"dispatch_combine": Part(0.008, 2e9, roofline_secs), "idle": Part(0.002)}
        measured = MeasuredStep(range(3, 7), 2, 0.010, parts)
        monkeypatch.setattr(traces, "read", lambda path: "trace")
        monkeypatch.setattr(networks, "of_devices", lambda devices: network)
        monkeypatch.setattr(measured_step, "measure", lambda *arguments: measured)

        mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=["device"]))
        call = ProfiledCall(range(3, 7), types.SimpleNamespace(mesh=mesh), 0.0)
        asked_for = Profile(asked, (call,), pathlib.Path("x.xplane.pb"))
        return profile.text(asked_for, dispatch).splitlines()

    return text


def test_a_table_without_rooflines(told):
    _, title, *rows, trace = told(range(3, 7), None)
    assert title == "Steps 3 to 6, 10.00 ms each, mean of 2 devices of this process:"
    assert [row.split() for row in rows] == [
        "of a step, on a device ms share Gflop Gflop/s".split(),
        "dispatch, combine 8.000 80.0% 2.000 250.0".split(),
        "idle 2.000 20.0% - -".split(),
        "all 10.000 100.0% 2.000 200.0".split(),
    ]
    assert trace == "The trace is x.xplane.pb."


def test_rooflines_and_whole_calls(told):
    _, title, header, row, idle, whole, _ = told(range(5, 6), "network", "EINSUM")
    assert title.endswith(
        "; 5 to 5 were asked for, but calls of up to 4 steps (train.iterations_per_loop) are "
        "traced as wholes; tokens reach their experts by EINSUM:"
    )
    assert header.endswith("roofline ms  of the roofline")
    assert row.split()[-2:] == ["4.000", "50%"]
    assert idle.split()[-2:] == ["-", "-"]
    assert whole.split()[-2:] == ["4.000", "40%"]
