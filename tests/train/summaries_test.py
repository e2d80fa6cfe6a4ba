"""Tags of summaries, their writer in the background, and lines that are whole or not there."""

import threading

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train import summaries
from lingvo_gshard.train.hooks import TrainCall
from lingvo_gshard.train.summaries import SummaryHook, append_line, read_lines, scalars


def test_scalars_name_every_element():
    metrics = NestedMap(load=NestedMap(encoder_1=np.array([0.5, 1.5])), loss=np.float32(2))
    assert scalars(metrics) == {"load/encoder_1/0": 0.5, "load/encoder_1/1": 1.5, "loss": 2.0}


def test_a_line_takes_the_place_of_one_cut_short(tmp_path):
    """As a full disk or a power cut leaves it."""
    path = tmp_path / "lines"
    for cut in ("", '{"st', '{"step": 9}'):
        path.write_text('{"step": 1}\n' + cut)
        assert read_lines(path) == [{"step": 1}]
        append_line(path, {"step": 2})
        assert read_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"cut in the fir')
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 3}]


class _SlowWriter:
    """Waits, for each summary, until it may go on."""

    def __init__(self, folder):
        self.may, self.steps, self.closed = threading.Semaphore(0), [], False

    def add_scalar(self, tag, value, step):
        if tag == "loss":
            self.may.acquire()
            self.steps.append((step, value, threading.current_thread().name))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def _call(step):
    return TrainCall(step, 1, NestedMap(loss=np.float32([step])), 1.0)


def test_training_does_not_wait_for_a_summary_but_at_the_end(tmp_path, monkeypatch):
    writer = _SlowWriter(tmp_path)
    monkeypatch.setattr(summaries.summary, "Writer", lambda folder: writer)
    hook = SummaryHook(tmp_path, every_steps=2)
    for step in (1, 2, 3):
        hook.after_call(_call(step))
    assert writer.steps == []
    writer.may.release(2)
    hook.after_call(_call(4))
    hook.end()
    assert writer.steps == [(2, 1.5, "summaries_0"), (4, 3.5, "summaries_0")] and writer.closed


def test_an_error_of_a_summary_reaches_the_training_thread(tmp_path, monkeypatch):
    def failing(folder):
        raise OSError("No space left on device")

    monkeypatch.setattr(summaries.summary, "Writer", failing)
    hook = SummaryHook(tmp_path, every_steps=1)
    hook.after_call(_call(1))
    with pytest.raises(OSError, match="No space left"):
        hook.after_call(_call(2))
    hook = SummaryHook(tmp_path, every_steps=9)
    hook.after_call(_call(1))
    with pytest.raises(OSError, match="No space left"):
        hook.end()
