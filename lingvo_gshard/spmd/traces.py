"""Traces of programs on their devices: making them with JAX's profiler, and reading them.

        FOLDER/plugins/profile/TIME/HOST.xplane.pb      the trace for `read` and for TensorBoard
        FOLDER/plugins/profile/TIME/HOST.trace.json.gz  the same for Perfetto

XLA names each run of an instruction after the instruction in the compiled program: on CPUs in the
host's threads, with the device's number; on GPUs in the device's streams; and on TPUs in a separate
line.
"""

import contextlib
import dataclasses
import pathlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

import jax

_CALL = "train"  # TensorBoard takes it for a step.
_HOST = "/host:CPU"
_DEVICE = re.compile(r"/device:(GPU|TPU):(\d+)")
# The lines of a device that have runs of instructions. Others repeat them by module or by name.
_LINES = {"GPU": "Stream", "TPU": "XLA Ops"}
_INSTRUCTION = re.compile(r"%?([\w.-]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A time interval in a trace, in nanoseconds of the trace's clock."""

    start_ns: float
    end_ns: float


@dataclasses.dataclass(frozen=True, slots=True)
class InstructionRun:
    """One run of an instruction on one device."""

    device: int  # The device's index among this process's devices.
    instruction: str  # Its name in the compiled program; "" if the trace lacks it.
    start_ns: float
    end_ns: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """The instructions that this process's devices ran, and the marked calls."""

    calls: dict[int, Interval]  # By the number given to `mark`.
    runs: tuple[InstructionRun, ...]


def mark(number: int) -> contextlib.AbstractContextManager[Any]:
    """Marks a call in the current trace, if any. Wait for the call's results in this context."""
    return jax.profiler.StepTraceAnnotation(_CALL, step_num=number)


def start(folder: pathlib.Path) -> None:
    """Begins a trace, which will be written below `folder`. Only one trace can run at a time."""
    # Python's own calls would make the trace many times as large.
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)


def stop(folder: pathlib.Path) -> pathlib.Path:
    """Ends the trace that `start` began in `folder`; returns its .xplane.pb."""
    jax.profiler.stop_trace()
    written = folder.glob("plugins/profile/*/*.xplane.pb")
    return max(written, key=lambda path: path.stat().st_mtime_ns)


def read(path: pathlib.Path) -> Trace:
    """Returns a trace that `stop` wrote."""
    calls: dict[int, Interval] = {}
    runs: list[InstructionRun] = []
    with warnings.catch_warnings():
        # The classes of ProfileData lack attributes that Python 3.13 expects of built-in ones.
        warnings.simplefilter("ignore", DeprecationWarning)

        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            device = _DEVICE.fullmatch(plane.name)
            if plane.name == _HOST:
                _read_host(plane.lines, calls, runs)
            elif device is not None:
                kind, number = device.groups()
                lines = (line for line in plane.lines if line.name.startswith(_LINES[kind]))
                runs += _device_runs(lines, int(number))
    return Trace(calls, tuple(runs))


def _read_host(
    lines: Iterable[Any], calls: dict[int, Interval], runs: list[InstructionRun]
) -> None:
    """Adds the marked calls, and the instructions that CPU devices ran."""
    for line in lines:
        for event in line.events:
            stats = dict(event.stats)
            if event.name == _CALL and "step_num" in stats:
                calls[int(stats["step_num"])] = Interval(event.start_ns, event.end_ns)
            elif "hlo_op" in stats:
                runs.append(_run(event, stats, int(stats["device_ordinal"])))


def _device_runs(lines: Iterable[Any], device: int) -> list[InstructionRun]:
    """Returns the instructions that a GPU or TPU ran."""
    runs = []
    for line in lines:
        for event in line.events:
            runs.append(_run(event, dict(event.stats), device))
    return runs


def _run(event: Any, stats: dict[str, Any], device: int) -> InstructionRun:
    name = stats.get("hlo_op")
    if name is None:
        # A TPU event's name is the instruction's text: `%fusion.3 = bf16[...] ...`. A GPU event's
        # name is the kernel's, which does not occur in the program.
        text = _INSTRUCTION.match(event.name) if event.name.startswith("%") else None
        name = text[1] if text else ""
    return InstructionRun(device, str(name), event.start_ns, event.end_ns)
