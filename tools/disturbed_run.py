"""Starts the processes of a training run, watches their progress, and logs how they are killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.checkpoints import saved_steps
from lingvo_gshard.spmd import processes
from lingvo_gshard.train import hooks, metrics_files, summaries


@dataclasses.dataclass(frozen=True)
class Layout:
    """The number of partitions, and of the processes that share them."""

    partitions: int
    processes: int = 1

    @staticmethod
    def parse(text: str) -> Layout:
        """Parses `PARTITIONS` or `PARTITIONS/PROCESSES`; raises ValueError for other text."""
        if not re.fullmatch(r"[1-9]\d*(/[1-9]\d*)?", text):
            raise ValueError(f"layout {text}: expected PARTITIONS or PARTITIONS/PROCESSES.")
        return Layout(*map(int, text.split("/")))


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run: trainer processes write its files, and this process reads them.

    Attributes:
      folder: the run's logdir. The trainers' output goes to a file beside it, with suffix .log.
      trainer_flags: the trainer's flags, except for the folder and the layout.
    """

    folder: pathlib.Path
    trainer_flags: tuple[str, ...] = ()

    def start(self, layout: Layout) -> list[subprocess.Popen]:
        """Starts the trainer's processes, which continue the run."""
        command = [sys.executable, "-m", "lingvo_gshard.trainer", "--platform=cpu"]
        command += ["--mode=train", f"--logdir={self.folder}"]
        command += [f"--num_partitions={layout.partitions}"]
        command += self.trainer_flags
        if layout.processes > 1:
            command += [f"--coordinator=127.0.0.1:{_free_port()}"]
            command += [f"--num_processes={layout.processes}"]
        with self.folder.with_suffix(".log").open("a", encoding="utf-8") as log:
            return [
                subprocess.Popen([*command, f"--process_id={i}"], stdout=log, stderr=log)
                for i in range(layout.processes)
            ]

    def calls(self) -> list[dict[str, Any]]:
        """Returns the logged line of every call of the training program."""
        return metrics_files.read_lines(self.folder / metrics_files.TRAIN_METRICS)

    def log_inode(self) -> int | None:
        """Returns the inode of the log of calls, or None before the log exists."""
        path = self.folder / metrics_files.TRAIN_METRICS
        return path.stat().st_ino if path.exists() else None

    def losses(self) -> dict[int, float]:
        """Returns the mean loss of every logged call, keyed by the call's last step."""
        return {call["step"]: call["metrics"]["loss"] for call in self.calls()}

    def incomplete_checkpoints(self) -> set[int]:
        """Returns the inodes of the checkpoints that are not complete."""
        folder = saved_steps.folder(self.folder)
        found = set()
        for path in folder.iterdir() if folder.exists() else ():
            with contextlib.suppress(FileNotFoundError):  # The trainer may be renaming it.
                if path.is_dir() and not path.name.isdigit():
                    found.add(path.stat().st_ino)
        return found

    def saved_step(self) -> int:
        """Returns the step of the newest complete checkpoint, or 0 before the first one."""
        return max(saved_steps.whole_steps(self.folder), default=0)

    def num_damaged(self) -> int:
        """Returns the number of checkpoints that the trainers found damaged."""
        return len(list((self.folder / "damaged_checkpoints").glob("*")))

    def fingerprints(self) -> dict[str, list[str]]:
        """Returns the fingerprints of every array and expert in the newest checkpoint."""
        newest = self.folder / "checkpoints" / str(self.saved_step())
        return json.loads((newest / "about/metadata").read_text(encoding="utf-8"))["fingerprints"]


class ProgressWatcher:
    """Watches the progress of a new process of a run; create it before the process starts.

    When a trainer begins, it replaces the log by a new file with the calls up to the checkpoint.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._old_log = run.log_inode()
        self._old_incomplete = run.incomplete_checkpoints()
        self._num_kept: int | None = None

    def calls(self) -> list[dict[str, Any]]:
        """Returns the lines of the calls that the process has logged."""
        log = self._run.log_inode()
        calls = self._run.calls()
        if self._num_kept is None and log != self._old_log:
            self._num_kept = len(calls)
        return [] if self._num_kept is None else calls[self._num_kept :]

    def has_incomplete_checkpoint(self) -> bool:
        """Returns whether the process has begun a checkpoint that is not complete."""
        return bool(self._run.incomplete_checkpoints() - self._old_incomplete)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill. A line of the log has the same fields.

    Attributes:
      moment: "start", "step" or "save".
      before: the last logged step when the process started.
      after: the last logged step when it ended.
      secs: the lifetime of the process, in seconds.
      others_secs: the seconds from its end to the end of the other processes.
      first_call_secs: the seconds from its start to the end of its first call, or None if it was
        killed earlier.
      cut_short: whether the process left an incomplete checkpoint.
      status: the exit status of the process that was killed.
    """

    moment: str
    before: int
    after: int
    secs: float
    others_secs: float
    first_call_secs: float | None
    cut_short: bool
    status: int


class KillLog:
    """A file of JSON lines: the settings of a soak test, its kills and its finished runs.

    Attributes:
      run_secs: the seconds that each finished run took (after the last kill, if it was killed), by
        the run's name.
      kills: all kills so far.
    """

    def __init__(self, path: pathlib.Path, settings: dict[str, Any]) -> None:
        """Continues the file if it exists.

        Raises:
          ValueError: the file has other settings.
        """
        self._path = path
        lines = metrics_files.read_lines(path)
        if lines and lines[0] != settings:
            raise ValueError(f"{path} has other settings: {lines[0]}; choose another --out.")
        if not lines:
            summaries.append_line(path, settings)
        self.run_secs = {line["run"]: line["secs"] for line in lines[1:] if "run" in line}
        self.kills = [Kill(**line) for line in lines[1:] if "moment" in line]

    def add_run(self, name: str, secs: float) -> None:
        """Records that a run has finished."""
        self.run_secs[name] = secs
        summaries.append_line(self._path, {"run": name, "secs": secs})

    def add_kill(self, kill: Kill) -> None:
        """Records a kill."""
        self.kills.append(kill)
        summaries.append_line(self._path, dataclasses.asdict(kill))

    def start_secs(self, default: float) -> float:
        """Returns the least time from a start to the end of the first call, or `default`."""
        known = [kill.first_call_secs for kill in self.kills if kill.first_call_secs is not None]
        return min(known, default=default)


def check_exit_statuses(
    sent: signal.Signals, moment: str, status: int, other_statuses: Sequence[int]
) -> None:
    """Checks that each process ended as it should. Any process may have finished just before.

    Args:
      sent: the signal, SIGKILL or SIGTERM.
      moment: "start", "step" or "save".
      status: the exit status of the process that received the signal.
      other_statuses: the exit statuses of the other processes. They are not checked for "start",
        because the processes may not be connected yet.

    Raises:
      RuntimeError: a process ended with an unexpected status.
    """
    expected = {0, -signal.SIGKILL if sent == signal.SIGKILL else hooks.EXIT_STATUS}
    others_expected = {0, processes.EXIT_STATUS if sent == signal.SIGKILL else hooks.EXIT_STATUS}
    if moment == "start":  # Before training has begun, SIGTERM ends a process at once.
        expected.add(-sent)
    if status not in expected:
        raise RuntimeError(f"{sent.name} in a {moment}: the process exited with status {status}.")
    if moment != "start" and not others_expected.issuperset(other_statuses):
        raise RuntimeError(
            f"{sent.name} in a {moment}: the other processes exited with {other_statuses}."
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
