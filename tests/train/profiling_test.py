"""Traces of training: the calls in them, and when they end."""

import jax
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import traces
from lingvo_gshard.train import profiling
from lingvo_gshard.train.hooks import TrainCall
from lingvo_gshard.train.profiling import ProfileHook
from tests.train import regression


@pytest.fixture
def profiles():
    return []


@pytest.mark.parametrize(
    ("asked", "calls"),
    [
        (range(3, 5), [(3, 4)]),
        (range(4, 6), [(3, 4), (5, 6)]),
        (range(6, 10), [(5, 6), (7, 8)]),  # Training ends before.
    ],
)
def test_whole_calls_are_traced(asked, calls, profiles, tmp_path, monkeypatch):
    """Calls of two steps each, up to the eighth step."""
    happened = []
    monkeypatch.setattr(traces, "start", lambda folder: happened.append(("start", folder)))
    monkeypatch.setattr(traces, "stop", lambda folder: folder / "x")
    hook = ProfileHook(asked, tmp_path, profiles.append)
    for step in range(2, 9, 2):
        hook.before_call(range(step - 1, step + 1), executable=f"program of {step}")
        hook.after_call(TrainCall(step, 2, NestedMap(), secs=1.0, input_wait_secs=step / 10))
    hook.end()

    (profile,) = profiles
    assert happened == [("start", tmp_path / "train")] and profile.path == tmp_path / "train/x"
    assert [(call.steps.start, call.number) for call in profile.calls] == calls
    for call in profile.calls:
        assert call.executable == f"program of {call.number}"
        assert call.input_wait_secs == call.number / 10


def test_an_error_in_the_first_call_ends_the_trace(profiles, tmp_path, monkeypatch):
    stopped = []
    monkeypatch.setattr(traces, "start", lambda folder: None)
    monkeypatch.setattr(traces, "stop", stopped.append)
    hook = ProfileHook(range(1, 3), tmp_path, profiles.append)
    hook.before_call(range(1, 3), executable=None)
    hook.end()
    assert stopped and not profiles


@pytest.mark.slow
def test_a_trace_has_the_work_of_both_devices_in_each_call(profiles, tmp_path):
    estimator = regression.make(tmp_path, steps_per_call=2)
    hook = ProfileHook(range(3, 7), tmp_path, profiles.append)
    estimator.train(lambda _: regression.Batches(), max_steps=7, hooks=[hook])

    (profile,) = profiles
    assert isinstance(profile, profiling.Profile) and profile.path.with_name("x").parent.is_dir()
    assert list(profile.path.parent.glob("*.trace.json.gz"))  # For Perfetto.
    trace = traces.read(profile.path)
    assert sorted(trace.calls) == [4, 6]

    # All names are in the compiled program, and all times within the calls.
    module = profile.calls[0].executable.module
    names = {each.name for each in module.instructions()}
    assert {run.instruction for run in trace.runs} <= names
    assert {run.device for run in trace.runs} == {device.id for device in jax.devices()[:2]}
    for run in trace.runs:
        around = [
            call
            for call in trace.calls.values()
            if call.start_ns <= run.start_ns <= run.end_ns <= call.end_ns
        ]
        assert len(around) == 1
