"""A process that runs programs. If a program kills it, the next call starts a new one."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pathlib
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import lingvo_gshard as gshard

if TYPE_CHECKING:
    from tools.fuzz_programs.draft import Choices

# XLA plans and partitions as always, but hardly optimizes the machine code.
_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
_NUM_DEVICES = 8
_HANG_SECS = 900.0  # A busy machine may need minutes for the imports alone.

FINDINGS = ("error", "died", "wrong")
# Traced functions are never freed.
_MAX_CALLS = 250


class Died(Exception):
    """The process was aborted, or did not answer in time."""


def outcome_of_seed(worker: Worker, seed: int, choices: Choices) -> dict[str, Any]:
    """Returns the outcome of the program of a seed, as a line of the log.

    The outcome is `died` if two processes die. If only the first one dies, the line has its last
    words as `died_once`.
    """
    try:
        return worker.call(_outcome, seed, choices)
    except Died as death:
        first = str(death)

    # The process may also have died of an earlier program, or because the machine's memory is full.
    try:
        return worker.call(_outcome, seed, choices) | {"died_once": first}
    except Died as death:
        return _death(death)


def outcome_of_program(worker: Worker, text: str, seed: int) -> dict[str, Any]:
    """Returns the outcome of a program, which is given as JSON."""
    try:
        return worker.call(_outcome_of_text, text, seed)
    except Died as death:
        return _death(death)


def _death(death: Died) -> dict[str, Any]:
    return {"kind": "died", "detail": str(death), "names": [], "secs": 0.0}


# The process calls these functions. Their imports need the process's environment.
def _outcome(seed: int, choices: Choices) -> dict[str, Any]:
    from tools.fuzz_programs import generate, partitioned

    program = generate.generate(seed, choices)
    operators = sorted({record.operator for record in program.records})
    outcome = partitioned.outcome(program, seed)
    return dataclasses.asdict(outcome) | {"operators": operators}


def _outcome_of_text(text: str, seed: int) -> dict[str, Any]:
    from tools.fuzz_programs import partitioned, program

    return dataclasses.asdict(partitioned.outcome(program.from_json(text), seed))


class Worker:
    """Calls functions in a separate process."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: connection.Connection | None = None
        self._num_calls = 0
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz_programs")
        self._stderr = pathlib.Path(self._folder.name) / "stderr"

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function`, which must be defined by a module, and returns its result.

        Raises Died with the last words of the process if it ends, and RuntimeError if the function
        raises an exception.
        """
        if self._num_calls >= _MAX_CALLS:
            self.close()
        if self._process is None:
            self._start()
        self._num_calls += 1

        self._pipe.send((function, args))
        try:
            if not self._pipe.poll(_HANG_SECS):
                raise Died(f"no answer in {_HANG_SECS:.0f} s")
            is_result, answer = self._pipe.recv()
        except (EOFError, ConnectionError, Died) as error:
            if isinstance(error, Died):
                last_words = str(error)
            else:
                self._process.join()
                last_words = f"exit code {self._process.exitcode}: {self._last_words()}"
            self.close()
            raise Died(last_words) from None
        if not is_result:
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None
        self._num_calls = 0

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._stderr), daemon=True)
        self._process.start()
        theirs.close()

    def _last_words(self) -> str:
        """Returns the fatal line of the process's stderr, or its last line."""
        lines = self._stderr.read_text(errors="replace").splitlines()
        fatal = [line for line in lines if line.startswith("F") or "Check failed" in line]
        return " ".join((fatal or lines or [""])[-1].split())[:500]


def prepare() -> None:
    """Prepares a process that has not imported TensorFlow or JAX to draw and run programs."""
    # TensorFlow's oneDNN kernels write out of bounds for some small shapes.
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}"
    gshard.prepare(num_devices=_NUM_DEVICES, platform="cpu")


def _serve(pipe: connection.Connection, stderr: pathlib.Path) -> None:
    """Answers calls until the pipe is closed."""
    descriptor = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    prepare()

    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
