"""Kills a training run again and again, and compares what it ends in with an undisturbed run.

    python -m tools.soak --data_dir=DATA --out=OUT --kills=30 --set=train.max_steps=200 \
        --set=train.iterations_per_loop=5 --set=train.save_checkpoints_steps=10
    python -m tools.soak --data_dir=DATA --out=OUT --kills=10 --signal=TERM
    python -m tools.soak --data_dir=DATA --out=OUT --kills=6 --layouts=1,2,4,4/2

A third of the kills come while the process starts, a third in a step, a third in a save, each at a
random moment of it. With one layout the losses of every call and the final state must be equal bit
for bit; with several, which take turns, the losses agree within --tolerance. SIGTERM, besides, must
lose no step. Of several processes one is killed, and the others must end by themselves. Exit
status 1 if not so; with --max_secs, 75 once they are over: the same command goes on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared data folder.", required=True)
_OUT = flags.DEFINE_string("out", None, "A folder for both runs.", required=True)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_KILLS = flags.DEFINE_integer("kills", 30, "How often.")
_SIGNAL = flags.DEFINE_enum("signal", "KILL", ["KILL", "TERM"], "By which signal.")
_LAYOUTS = flags.DEFINE_list("layouts", ["2"], "Partitions, or partitions/processes; in turn.")
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-3, "Of losses, relative, if layouts change.")
_SEED = flags.DEFINE_integer("seed", 1, "Of the moments.")
_MAX_SECS = flags.DEFINE_float("max_secs", math.inf, "End after the kill in which they are over.")

_MOMENTS = ("start", "step", "save")
# The trainer's exit statuses: after SIGTERM, and after another process of the run has ended.
_STOPPED, _PEER_LOST = 75, 69
_GOES_ON = 75  # This program's own, before it is done.
_OTHERS_END_SECS = 60.0
_MOST_CALLS = 4  # Of a process before it is killed.
_SHARE_OF_CALL = {"step": 1.0, "save": 0.2}  # How long after it is in that moment, at most.
_POLL_SECS = 0.005


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
    """A run's folder, which the trainer writes to and this process reads."""

    folder: pathlib.Path

    def start(self, layout: Layout) -> list[subprocess.Popen]:
        """The trainer's processes, going on where the run is; all print to folder.log."""
        command = [sys.executable, "-m", "lingvo_gshard.trainer", "--mode=train"]
        command += [f"--model={_MODEL.value}", f"--data_dir={_DATA_DIR.value}"]
        command += [f"--logdir={self.folder}", f"--num_partitions={layout.partitions}"]
        command += [f"--set={setting}" for setting in _SET.value]
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
        return _read_lines(self.folder / "train_metrics.jsonl")

    def log_inode(self) -> int | None:
        """Which file the log is; None if there is none."""
        path = self.folder / "train_metrics.jsonl"
        return path.stat().st_ino if path.exists() else None

    def losses(self) -> dict[int, float]:
        """The mean loss of each call that was logged, by its last step."""
        return {call["step"]: call["metrics"]["loss"] for call in self.calls()}

    def partial_checkpoints(self) -> set[int]:
        """The inodes of checkpoints that are not whole."""
        folder = self.folder / "checkpoints"
        found = set()
        for path in folder.iterdir() if folder.exists() else ():
            with contextlib.suppress(FileNotFoundError):  # It is given another name just now.
                if path.is_dir() and not (path / "digests.json").exists():
                    found.add(path.stat().st_ino)
        return found

    def saved_step(self) -> int:
        """Of the newest whole checkpoint; 0 if there is none."""
        found = (self.folder / "checkpoints").glob("*/digests.json")
        return max((int(path.parent.name) for path in found), default=0)

    def num_damaged(self) -> int:
        """Checkpoints that were found damaged."""
        return len(list((self.folder / "damaged_checkpoints").glob("*")))

    def fingerprints(self) -> dict[str, list[str]]:
        """Of the newest checkpoint's every array and expert."""
        newest = self.folder / "checkpoints" / str(self.saved_step())
        return json.loads((newest / "about/metadata").read_text())["fingerprints"]


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill, as OUT/soak.jsonl tells it.

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


@dataclasses.dataclass(frozen=True)
class _Wish:
    """When a process shall end.

    Attributes:
      moment: start, step or save.
      start_secs: after its start, if it is in that.
      num_calls: after so many calls, otherwise;
      share: and that much of one more.
    """

    moment: str
    start_secs: float
    num_calls: int
    share: float


class Story:
    """OUT/soak.jsonl: what was asked for, and what has happened so far."""

    def __init__(self, path: pathlib.Path) -> None:
        """Goes on with the file, if there is one; app.Error if it is of another command."""
        self._path = path
        asked = {
            flag.name: flag.value
            for flag in (_MODEL, _DATA_DIR, _SET, _KILLS, _SIGNAL, _LAYOUTS, _SEED)
        }
        lines = _read_lines(path)
        if lines and lines[0] != asked:
            raise app.Error(f"{path} is of {lines[0]}; choose another --out.")
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


def main(argv: list[str]) -> None:
    del argv
    began = time.monotonic()
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    story = Story(out / "soak.jsonl")
    whole, disturbed = Run(out / "whole"), Run(out / "disturbed")
    layouts = [Layout.parse(text) for text in _LAYOUTS.value]
    if "whole" not in story.secs:
        story.note_run("whole", _finish(whole, layouts[0]))
    print(f"Undisturbed: {story.secs['whole']:.0f} s.", flush=True)
    while "disturbed" not in story.secs:
        if time.monotonic() - began > _MAX_SECS.value:
            print(f"{len(story.kills)} kills so far; the same command goes on.")
            sys.exit(_GOES_ON)
        number = len(story.kills)
        layout = layouts[number % len(layouts)]
        if number >= _KILLS.value or disturbed.saved_step() == whole.saved_step():
            story.note_run("disturbed", _finish(disturbed, layout))
            break
        rng = random.Random(f"{_SEED.value} {number}")
        wish = _wish(number, rng, story.start_secs(whole.calls()[0]["wall_secs"]))
        kill = _kill(disturbed, layout, wish, rng)
        story.note_kill(kill)
        steps = f"steps {kill.before} to {kill.after}"
        print(f"{number + 1}: in a {kill.moment}, {steps}, status {kill.status}", flush=True)
    _tell(story)
    sys.exit(0 if _agree(whole, disturbed) else 1)


def _kill(run: Run, layout: Layout, wish: _Wish, rng: random.Random) -> Kill:
    """Starts the run, ends one of its processes when it is wished, and sees to the others."""
    before, news = max(run.losses(), default=0), _News(run)
    processes = run.start(layout)
    with _ended(processes):
        began = time.monotonic()
        moment, first_call_secs = _wait(wish, news, processes)
        killed = rng.choice(processes)
        # Those that have not met yet would wait for each other: there all are killed.
        for process in processes if moment == "start" else [killed]:
            process.send_signal(signal.Signals[f"SIG{_SIGNAL.value}"])
        status, ended = killed.wait(), time.monotonic()
        others = [
            process.wait(timeout=_OTHERS_END_SECS) for process in processes if process is not killed
        ]
    after = max(run.losses(), default=0)
    _check_ended(status, others, moment)
    if _SIGNAL.value == "TERM" and run.saved_step() != after:
        raise app.Error(f"Step {after} was done, but the last one saved is {run.saved_step()}.")
    return Kill(
        moment,
        before,
        after,
        secs=ended - began,
        others_secs=time.monotonic() - ended,
        first_call_secs=first_call_secs,
        cut_short=news.has_partial_checkpoint(),
        status=status,
    )


def _wish(number: int, rng: random.Random, start_secs: float) -> _Wish:
    return _Wish(
        _MOMENTS[number % len(_MOMENTS)],
        start_secs * rng.random(),
        rng.randint(1, _MOST_CALLS),
        rng.random(),
    )


def _check_ended(status: int, others: Sequence[int], moment: str) -> None:
    """app.Error unless each process ended as it should: the one that was sent the signal, and the
    others if they had met. Any may have been done just then.
    """
    if _SIGNAL.value == "KILL":
        of_killed, of_others = {-signal.SIGKILL, 0}, {_PEER_LOST, 0}
    else:
        of_killed, of_others = {_STOPPED, 0}, {_STOPPED, 0}
        if moment == "start":  # Before training had begun.
            of_killed.add(-signal.SIGTERM)
    if status not in of_killed:
        raise app.Error(f"SIG{_SIGNAL.value} in a {moment} ended it with status {status}.")
    if moment != "start" and not of_others.issuperset(others):
        raise app.Error(f"SIG{_SIGNAL.value} in a {moment}: the others' statuses are {others}.")


def _wait(
    wish: _Wish, news: _News, processes: Sequence[subprocess.Popen]
) -> tuple[str, float | None]:
    """Waits until the wish is fulfilled, or a process has ended.

    Returns:
      The moment that it came to be, and the seconds from the start to the first call's end; None
      if there was none.
    """
    began, first_call_secs = time.monotonic(), None
    while all(process.poll() is None for process in processes):
        time.sleep(_POLL_SECS)
        calls = news.calls()
        if calls and first_call_secs is None:
            first_call_secs = time.monotonic() - began
        if wish.moment == "start":
            if calls or time.monotonic() - began >= wish.start_secs:
                return "step" if calls else "start", first_call_secs
        elif len(calls) >= wish.num_calls and news.has_partial_checkpoint() == (
            wish.moment == "save"
        ):
            time.sleep(wish.share * calls[-1]["secs"] * _SHARE_OF_CALL[wish.moment])
            return "save" if news.has_partial_checkpoint() else "step", first_call_secs
    return "step" if first_call_secs else "start", first_call_secs


class _News:
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


@contextlib.contextmanager
def _ended(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
    """None of them outlives this."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _finish(run: Run, layout: Layout) -> float:
    """Lets the run come to its end; how long that took."""
    began, processes = time.monotonic(), run.start(layout)
    with _ended(processes):
        statuses = [process.wait() for process in processes]
    if any(statuses):
        log = run.folder.with_suffix(".log").read_text()
        raise app.Error(f"The trainer ended with {statuses}: {log[-2000:]}")
    return time.monotonic() - began


def _tell(story: Story) -> None:
    """Prints what was done to the run, and what it cost."""
    kills = story.kills
    moments = collections.Counter(kill.moment for kill in kills)
    secs = story.secs["disturbed"] + sum(kill.secs + kill.others_secs for kill in kills)
    lost = secs - story.secs["whole"]
    print(
        f"SIG{_SIGNAL.value} {len(kills)} times: "
        f"{', '.join(f'{count} in a {moment}' for moment, count in sorted(moments.items()))}; "
        f"{sum(kill.cut_short for kill in kills)} left a checkpoint cut short."
    )
    print(f"{secs:.0f} s in all, {lost:.0f} s lost, {lost / max(len(kills), 1):.1f} s each time.")
    if any(Layout.parse(text).processes > 1 for text in _LAYOUTS.value):
        slowest = max(kill.others_secs for kill in kills)
        print(f"The other processes ended within {slowest:.1f} s.")


def _agree(whole: Run, disturbed: Run) -> bool:
    """Prints how the two runs compare; whether they are as they should be."""
    want, got = whole.losses(), disturbed.losses()
    apart = max((abs(got[s] - want[s]) / abs(want[s]) for s in want if s in got), default=math.inf)
    same_calls = want.keys() == got.keys()
    print(
        f"Losses of {len(want)} calls: largest relative difference {apart:.3g}; "
        f"{disturbed.num_damaged()} checkpoints were found damaged."
    )
    if not same_calls:
        print("The logged steps are not the same.")
    if len(set(_LAYOUTS.value)) > 1:
        return same_calls and apart <= _TOLERANCE.value
    equal = whole.fingerprints() == disturbed.fingerprints()
    print(f"Final state: {'bit for bit equal' if equal else 'DIFFERENT'}.")
    return same_calls and equal and apart == 0.0


def _read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The whole JSON lines of a file; none if there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    app.run(main)
