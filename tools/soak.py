"""Kills a training run again and again, and compares what it ends in with an undisturbed run.

    python -m tools.soak --data_dir=DATA --out=OUT --kills=30 --set=train.max_steps=200 \
        --set=train.iterations_per_loop=5 --set=train.save_checkpoints_steps=10
    python -m tools.soak --data_dir=DATA --out=OUT --kills=10 --signal=TERM
    python -m tools.soak --data_dir=DATA --out=OUT --kills=6 --partitions=1,2,4

A third of the kills come while the process starts, a third in a step, a third in a save. With one
number of partitions the weights must end bit for bit equal; with several, which take turns, the
losses agree within --tolerance. SIGTERM, besides, must lose no step. Exit status 1 if not.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

from absl import app, flags

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared data folder.", required=True)
_OUT = flags.DEFINE_string("out", None, "A folder for both runs; made anew.", required=True)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_KILLS = flags.DEFINE_integer("kills", 30, "How often.")
_SIGNAL = flags.DEFINE_enum("signal", "KILL", ["KILL", "TERM"], "By which signal.")
_PARTITIONS = flags.DEFINE_list("partitions", ["2"], "Numbers of partitions, taking turns.")
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-3, "Of losses, relative, if partitions change.")
_SEED = flags.DEFINE_integer("seed", 1, "Of the moments.")

_MOMENTS = ("start", "step", "save")
_STOPPED = 75  # The trainer's exit status after SIGTERM.
_POLL_SECS = 0.005


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's folder, which the trainer writes to and this process reads."""

    folder: pathlib.Path

    def start(self, partitions: str) -> subprocess.Popen:
        """The trainer, going on where the run is; its output goes to folder.log."""
        command = [sys.executable, "-m", "lingvo_gshard.trainer", "--mode=train"]
        command += [f"--model={_MODEL.value}", f"--data_dir={_DATA_DIR.value}"]
        command += [f"--logdir={self.folder}", f"--num_partitions={partitions}"]
        command += [f"--set={setting}" for setting in _SET.value]
        with self.folder.with_suffix(".log").open("a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def losses(self) -> dict[int, float]:
        """The mean loss of each call that was logged, by its last step."""
        path = self.folder / "train_metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return {line["step"]: line["metrics"]["loss"] for line in whole}

    def is_saving(self) -> bool:
        """Whether a checkpoint is there that is not whole."""
        folder = self.folder / "checkpoints"
        if not folder.exists():
            return False
        steps = [path for path in folder.iterdir() if path.is_dir()]
        return any(not (path / "digests.json").exists() for path in steps)

    def saved_step(self) -> int:
        """Of the newest whole checkpoint; 0 if there is none."""
        found = (self.folder / "checkpoints").glob("*/digests.json")
        return max((int(path.parent.name) for path in found), default=0)

    def fingerprints(self) -> dict[str, list[str]]:
        """Of the newest checkpoint's every array and expert."""
        newest = self.folder / "checkpoints" / str(self.saved_step())
        return json.loads((newest / "about/metadata").read_text())["fingerprints"]


def main(argv: list[str]) -> None:
    del argv
    out = pathlib.Path(_OUT.value)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    whole, disturbed = Run(out / "whole"), Run(out / "disturbed")
    began = time.monotonic()
    _finish(whole.start(_PARTITIONS.value[0]), whole)
    whole_secs = time.monotonic() - began
    print(f"Undisturbed: {whole_secs:.0f} s.", flush=True)

    began = time.monotonic()
    moments = _disturb(disturbed, start_secs=_start_secs(whole, whole_secs))
    disturbed_secs = time.monotonic() - began
    lost = disturbed_secs - whole_secs
    kills = sum(moments.values())
    print(
        f"SIG{_SIGNAL.value} {kills} times: "
        f"{', '.join(f'{count} in a {moment}' for moment, count in sorted(moments.items()))}; "
        f"{disturbed_secs:.0f} s, {lost:.0f} s lost, {lost / max(kills, 1):.1f} s each time."
    )
    sys.exit(0 if _agree(whole, disturbed) else 1)


def _disturb(run: Run, start_secs: float) -> collections.Counter[str]:
    """Starts the run and ends it, as often as it shall be; then lets it finish.

    Returns how often it was ended at which moment.
    """
    rng, moments = random.Random(_SEED.value), collections.Counter[str]()
    turns = _PARTITIONS.value
    for i in range(_KILLS.value):
        process, wanted = run.start(turns[i % len(turns)]), _MOMENTS[i % len(_MOMENTS)]
        before = max(run.losses(), default=0)
        began = time.monotonic()
        moment = _wait_for(wanted, run, process, start_secs * rng.random())
        if moment != "start":  # Compiled programs were kept: it starts sooner than the first time.
            start_secs = min(start_secs, time.monotonic() - began)
        if process.poll() is not None:
            break  # The run is done.
        process.send_signal(signal.Signals[f"SIG{_SIGNAL.value}"])
        process.wait()
        moments[moment] += 1
        after = max(run.losses(), default=0)
        print(
            f"{i + 1}: in a {moment}, steps {before} to {after}, {process.returncode}", flush=True
        )
        if _SIGNAL.value == "TERM":
            _check_nothing_lost(run, process.returncode, after)
    _finish(run.start(turns[_KILLS.value % len(turns)]), run)
    return moments


def _check_nothing_lost(run: Run, status: int, step: int) -> None:
    """app.Error unless SIGTERM ended the process in order, its last step saved."""
    if status not in (_STOPPED, -signal.SIGTERM, 0):  # The second: before training had begun.
        raise app.Error(f"SIGTERM ended it with status {status}.")
    if run.saved_step() != step:
        raise app.Error(f"Step {step} was done, but the last one saved is {run.saved_step()}.")


def _wait_for(wanted: str, run: Run, process: subprocess.Popen, secs: float) -> str:
    """Waits for the moment, or the process's end; says in which it is."""
    began, steps = time.monotonic(), len(run.losses())
    while process.poll() is None:
        trains = len(run.losses()) > steps
        if wanted == "start" and (trains or time.monotonic() - began >= secs):
            return "step" if trains else "start"
        if wanted == "step" and trains:
            time.sleep(secs / 100)  # Somewhere in the calls after it.
            return "save" if run.is_saving() else "step"
        if wanted == "save" and trains and run.is_saving():
            return "save"
        time.sleep(_POLL_SECS)
    return wanted


def _start_secs(run: Run, whole_secs: float) -> float:
    """How long the undisturbed run took until its first step."""
    first = json.loads((run.folder / "train_metrics.jsonl").open().readline())
    return min(first["wall_secs"], whole_secs)


def _finish(process: subprocess.Popen, run: Run) -> None:
    if process.wait():
        log = run.folder.with_suffix(".log").read_text()
        raise app.Error(f"The trainer ended with {process.returncode}: {log[-2000:]}")


def _agree(whole: Run, disturbed: Run) -> bool:
    """Prints how the two runs compare; whether they are as they should be."""
    want, got = whole.losses(), disturbed.losses()
    apart = max((abs(got[s] - want[s]) / abs(want[s]) for s in want if s in got), default=math.inf)
    same_calls = want.keys() == got.keys()
    print(f"Losses of {len(want)} calls: largest relative difference {apart:.3g}.")
    if len(set(_PARTITIONS.value)) > 1:
        return apart <= _TOLERANCE.value
    equal = whole.fingerprints() == disturbed.fingerprints()
    print(f"Final state: {'bit for bit equal' if equal else 'DIFFERENT'}.")
    if _SIGNAL.value == "KILL" and not same_calls:
        print("The logged steps are not the same.")
    return equal and (same_calls or _SIGNAL.value == "TERM")


if __name__ == "__main__":
    app.run(main)
