"""A training run that is killed: its processes, what is seen of it from outside, and its story."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.spmd import processes
from lingvo_gshard.train import checkpoints, digests, stopping, summaries


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many partitions, over how many processes."""

    partitions: int
    processes: int = 1

    @staticmethod
    def parse(text: str) -> Layout:
        """`4`, or `4/2` for two processes; ValueError if it is neither."""
        return Layout(*map(int, text.split("/")))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that trainers write and this process reads.

    Attributes:
      folder: its logdir; what the trainers print goes to folder.log.
      trainer_flags: of the trainer, besides the folder and the layout.
    """

    folder: pathlib.Path
    trainer_flags: tuple[str, ...] = ()

    def start(self, layout: Layout) -> list[subprocess.Popen]:
        """The trainer's processes, going on where the run is."""
        command = [sys.executable, "-m", "lingvo_gshard.trainer", "--mode=train"]
        command += [f"--logdir={self.folder}", f"--num_partitions={layout.partitions}"]
        command += self.trainer_flags
        if layout.processes > 1:
            command += [f"--coordinator=127.0.0.1:{_free_port()}"]
            command += [f"--num_processes={layout.processes}"]
        with self.folder.with_suffix(".log").open("a") as log:
            return [
                subprocess.Popen([*command, f"--process_id={i}"], stdout=log, stderr=log)
                for i in range(layout.processes)
            ]

    def calls(self) -> list[dict[str, Any]]:
        """What was logged of each call."""
        return summaries.read_lines(self.folder / summaries.TRAIN_METRICS)

    def log_inode(self) -> int | None:
        """Which file the log is; None if there is none."""
        path = self.folder / summaries.TRAIN_METRICS
        return path.stat().st_ino if path.exists() else None

    def losses(self) -> dict[int, float]:
        """The mean loss of each call that was logged, by its last step."""
        return {call["step"]: call["metrics"]["loss"] for call in self.calls()}

    def partial_checkpoints(self) -> set[int]:
        """The inodes of checkpoints that are not whole."""
        folder = checkpoints.folder(self.folder)
        found = set()
        for path in folder.iterdir() if folder.exists() else ():
            with contextlib.suppress(FileNotFoundError):  # It is given another name just now.
                if path.is_dir() and not digests.exist(path):
                    found.add(path.stat().st_ino)
        return found

    def saved_step(self) -> int:
        """Of the newest whole checkpoint; 0 if there is none."""
        return max(checkpoints.whole_steps(self.folder), default=0)

    def num_damaged(self) -> int:
        """Checkpoints that were found damaged."""
        return len(list((self.folder / "damaged_checkpoints").glob("*")))

    def fingerprints(self) -> dict[str, list[str]]:
        """Of the newest checkpoint's every array and expert."""
        newest = self.folder / "checkpoints" / str(self.saved_step())
        return json.loads((newest / "about/metadata").read_text())["fingerprints"]


class News:
    """What a process adds to its run.

    As it begins, it puts another file in the log's place, with those calls that were saved.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._log_before = run, run.log_inode()
        self._partial_before = run.partial_checkpoints()
        self._num_kept: int | None = None

    def calls(self) -> list[dict[str, Any]]:
        """Those that it has logged."""
        inode, calls = self._run.log_inode(), self._run.calls()
        if self._num_kept is None and inode != self._log_before:
            self._num_kept = len(calls)
        return [] if self._num_kept is None else calls[self._num_kept :]

    def has_partial_checkpoint(self) -> bool:
        """Whether it has begun a checkpoint that is not whole."""
        return bool(self._run.partial_checkpoints() - self._partial_before)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
      moment: start, step or save.
      before, after: the last step that was logged before the process started and when it ended.
      secs: it lived.
      others_secs: that the others lived on.
      first_call_secs: from its start to the end of its first call; None if it came to none.
      cut_short: whether it left a checkpoint that is not whole.
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


class Story:
    """What was asked for, and what has happened so far, in a file: a JSON line each."""

    def __init__(self, path: pathlib.Path, asked: dict[str, Any]) -> None:
        """Goes on with the file, if there is one.

        Raises:
          ValueError: something else was asked for then.
        """
        self._path = path
        lines = summaries.read_lines(path)
        if lines and lines[0] != asked:
            raise ValueError(f"{path} is of {lines[0]}; choose another --out.")
        if not lines:
            self._append(asked)
        self.secs = {line["run"]: line["secs"] for line in lines[1:] if "run" in line}
        self.kills = [Kill(**line) for line in lines[1:] if "moment" in line]

    def note_run(self, name: str, secs: float) -> None:
        """A run, or its last part, came to its end after so long."""
        self.secs[name] = secs
        self._append({"run": name, "secs": secs})

    def note_kill(self, kill: Kill) -> None:
        """One more."""
        self.kills.append(kill)
        self._append(dataclasses.asdict(kill))

    def start_secs(self, at_first: float) -> float:
        """The least time to a process's first call, so far; `at_first` until that is known."""
        known = [kill.first_call_secs for kill in self.kills if kill.first_call_secs is not None]
        return min(known, default=at_first)

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def check_ended(sent: signal.Signals, moment: str, status: int, others: Sequence[int]) -> None:
    """Checks that each process ended as it should; any may have been done just then.

    Args:
      sent: SIGKILL or SIGTERM.
      moment: start, step or save.
      status: of the process that it was sent to.
      others: of the others, which had met it unless it was starting.

    Raises:
      RuntimeError: one did not.
    """
    of_it = {0, -signal.SIGKILL if sent == signal.SIGKILL else stopping.EXIT_STATUS}
    of_others = {0, processes.EXIT_STATUS if sent == signal.SIGKILL else stopping.EXIT_STATUS}
    if moment == "start":  # SIGTERM ends it at once before training has begun.
        of_it.add(-sent)
    if status not in of_it:
        raise RuntimeError(f"{sent.name} in a {moment} ended it with status {status}.")
    if moment != "start" and not of_others.issuperset(others):
        raise RuntimeError(f"{sent.name} in a {moment}: the others' statuses are {others}.")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
