"""A run's metrics: summaries for TensorBoard and others, and files with a JSON object per line."""

import json
import os
import pathlib
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import called
from lingvo_gshard.train.hooks import TrainCall, TrainHook, joined
from lingvo_gshard.train.metrics_files import EVAL_METRICS, TRAIN_METRICS, read_lines
from lingvo_gshard.train.writers import Writer
from xla_spmd.files import atomic_file, storage

# The function of a host_call: numbers by name, or None.
HostFn = Callable[..., Mapping[str, float] | None]


def scalars(metrics: NestedMap) -> dict[str, float]:
    """Returns every element of every metric by its tag, such as `routing/load_E/encoder_1/3`."""
    by_tag = {}
    for path, value in metrics.FlattenItems():
        tag = path.replace(".", "/")
        array = np.asarray(value)
        # A scalar has one index, (), which adds nothing to the tag.
        for index in np.ndindex(array.shape):
            by_tag["/".join([tag, *map(str, index)])] = float(array[index])
    return by_tag


class SummaryHook(TrainHook):
    """Writes the metrics' means since the last summary, every `every_steps` steps."""

    def __init__(self, writer: Writer, every_steps: int) -> None:
        self._writer = writer
        self._every_steps = every_steps
        self._calls: list[TrainCall] = []  # The calls since the last summary.

    def after_call(self, call: TrainCall) -> None:
        self._calls.append(call)
        if call.reaches_multiple_of(self._every_steps):
            self._write()

    def end(self) -> None:
        if self._calls:  # There are steps since the last multiple.
            self._write()

    def _write(self) -> None:
        call = joined(self._calls)
        self._calls = []
        speeds = {
            "speed/steps_per_sec": call.steps_per_sec,
            "speed/input_wait_share": call.input_wait_secs / call.secs,
        }
        if call.tokens_per_sec is not None:
            speeds["speed/tokens_per_sec"] = call.tokens_per_sec

        values = {**scalars(call.mean()), **speeds, **_memory_gib()}
        self._writer.add("train", values, call.step)


class HostCallHook(TrainHook):
    """Calls the function of a host_call for each step, and writes the numbers that it returns.

    `fn` is called after a call: by then the program is traced, and the function is known.
    """

    def __init__(self, writer: Writer, fn: Callable[[], HostFn | None]) -> None:
        self._writer = writer
        self._fn = fn

    def after_call(self, call: TrainCall) -> None:
        host_fn = self._fn()
        if host_fn is None:
            return

        first_step = call.step - call.num_steps + 1
        for k in range(call.num_steps):
            values = call.host_call.Transform(lambda stack, k=k: stack[k])
            numbers = called(host_fn, values.tensors)
            if numbers:
                self._writer.add("train", scalars(NestedMap(numbers)), first_step + k)


def _memory_gib() -> dict[str, float]:
    """Returns the peak memory of this process and, if devices report it, of its fullest device."""
    host_peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = {"memory/host_peak_gib": host_peak_kib / 2**20}

    device_peak_bytes = 0
    for device in jax.local_devices():
        stats = device.memory_stats() or {}  # CPUs do not report any.
        device_peak_bytes = max(device_peak_bytes, stats.get("peak_bytes_in_use", 0))
    if device_peak_bytes:
        peaks["memory/device_peak_gib"] = device_peak_bytes / 2**30
    return peaks


class MetricsLog(TrainHook):
    """Appends a line to train_metrics.jsonl after each call.

    A line's wall_secs cover all runs in this folder so far, including compilation and saving. Its
    `metrics` are each metric's mean over the call's steps, by dotted path.
    """

    def __init__(self, model_dir: str | pathlib.Path, began_secs: float) -> None:
        """`began_secs` is this run's start, a time.monotonic()."""
        self._path = pathlib.Path(model_dir) / TRAIN_METRICS
        self._began_secs = began_secs
        self._earlier_secs = 0.0  # The wall_secs of earlier runs.

    def begin(self, step: int) -> None:
        """Drops the lines after `step`, since those steps will be repeated."""
        # Published at once: a bucket must not have lines for steps that this run repeats.
        kept = [line for line in read_lines(self._path) if line["step"] <= step]
        self._earlier_secs = kept[-1]["wall_secs"] if kept else 0.0
        atomic_file.write(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        storage.publish(self._path)

    def after_save(self, step: int, state: NestedMap) -> None:
        storage.publish(self._path)

    def after_call(self, call: TrainCall) -> None:
        line = {
            "step": call.step,
            "num_steps": call.num_steps,
            "secs": round(call.secs, 6),
            "input_wait_secs": round(call.input_wait_secs, 6),
            "wall_secs": round(self._earlier_secs + time.monotonic() - self._began_secs, 3),
            "metrics": {path: mean.tolist() for path, mean in call.mean().FlattenItems()},
        }
        append_line(self._path, line)  # Published with the next checkpoint.


def write_evaluation(
    model_dir: str | pathlib.Path, name: str, result: dict[str, Any], writer: Writer
) -> None:
    """Writes an evaluation to `writer`, as eval_NAME, and to eval_metrics.jsonl.

    `result` has each metric, a number or nested lists of numbers, and `step`.
    """
    model_dir = pathlib.Path(model_dir)
    # Tags are as in training: `load_E/3` is one element of a list.
    values = NestedMap({metric: np.asarray(value) for metric, value in result.items()})
    writer.add(f"eval_{name}", scalars(values), int(result["step"]))

    append_line(model_dir / EVAL_METRICS, {"name": name, **result})
    storage.publish(model_dir)


def append_line(path: pathlib.Path, line: dict[str, Any]) -> None:
    """Appends a JSON line, after removing an incomplete last line; an OSError names the file."""
    with atomic_file.naming(path), path.open("ab+") as file:
        # A full disk or a power cut may have left a line without its end.
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - 1))
        last_byte = file.read(1)
        if last_byte not in (b"", b"\n"):
            file.seek(0)
            end_of_whole_lines = file.read().rfind(b"\n") + 1
            file.truncate(end_of_whole_lines)

        file.write(json.dumps(line).encode() + b"\n")
