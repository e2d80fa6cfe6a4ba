"""Tags of summaries, their writer, and lines that are complete or absent."""

import errno
import threading

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.hooks import TrainCall
from lingvo_gshard.train.metrics_files import read_lines
from lingvo_gshard.train.summaries import SummaryHook, append_line, scalars, write_evaluation
from lingvo_gshard.train.writers import TensorBoard


def test_scalars_name_every_element():
    metrics = NestedMap(load=NestedMap(encoder_1=np.array([0.5, 1.5])), loss=np.float32(2))
    assert scalars(metrics) == {"load/encoder_1/0": 0.5, "load/encoder_1/1": 1.5, "loss": 2.0}


def test_an_incomplete_line_is_replaced(tmp_path):
    """A full disk or a power cut leaves such a line."""
    path = tmp_path / "lines"
    for cut in ("", '{"st', '{"step": 9}'):
        path.write_text('{"step": 1}\n' + cut)
        assert read_lines(path) == [{"step": 1}]
        append_line(path, {"step": 2})
        assert read_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"step"; 2}\n')
    with pytest.raises(ValueError, match=f"{path} is damaged: Expecting ':'.*delete the line"):
        read_lines(path)
    path.write_text('{"cut in the fir')
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 3}]


def test_an_evaluation_has_the_tags_of_training(tmp_path):
    result = {"step": 3, "nll": 2.5, "load_E_encoder_1": [0.5, 1.5]}
    write_evaluation(tmp_path, "dev", result, TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path / "eval_dev"))
    events.Reload()
    tags = {"step", "nll", "load_E_encoder_1/0", "load_E_encoder_1/1"}
    assert set(events.Tags()["scalars"]) == tags
    assert [(e.step, e.value) for e in events.Scalars("load_E_encoder_1/1")] == [(3, 1.5)]


def _call(step):
    return TrainCall(step, 1, NestedMap(loss=np.float32([step])), 1.0)


def test_a_summary_holds_the_means_since_the_last_one(tmp_path):
    hook = SummaryHook(TensorBoard(tmp_path), every_steps=2)
    for step in range(1, 6):
        hook.after_call(_call(step))
    hook.end()
    events = EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(2, 1.5), (4, 3.5), (5, 5.0)]


def test_an_error_of_the_writers_thread_reaches_the_training_thread(tmp_path, monkeypatch):
    def failing(writer, data):
        raise OSError("No space left on device")

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(RecordWriter, "write", failing)
    hook = SummaryHook(TensorBoard(tmp_path), every_steps=1)
    with pytest.raises(OSError, match="No space left"):
        for step in range(1000):
            hook.after_call(_call(step + 1))


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def fail(self, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", fail)
    hook = SummaryHook(TensorBoard(tmp_path), 1)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/train'"):
        hook.after_call(TrainCall(1, 1, NestedMap(loss=np.ones(1)), 1.0))
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/eval_dev'"):
        write_evaluation(tmp_path, "dev", {"step": 1, "nll": 2.0}, TensorBoard(tmp_path))
