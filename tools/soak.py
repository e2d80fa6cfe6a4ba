"""Kills a training run again and again, and compares what it ends in with an undisturbed run.

    python -m tools.soak --data_dir=DATA --out=OUT --kills=30 --set=train.max_steps=200 \
        --set=train.iterations_per_loop=5 --set=train.save_checkpoints_steps=10
    python -m tools.soak --data_dir=DATA --out=OUT --kills=10 --signal=TERM
    python -m tools.soak --data_dir=DATA --out=OUT --kills=8 --layouts=2,4/2,1,4 \
        --tolerance=1e-3 --set=optimizer.schedule.multiplier=0.1

A third of the kills come while the process starts, a third in a step, a third in a save, each at a
random moment of it. With one layout the losses of every call and the final state must be equal bit
for bit; with several, which take turns, the losses agree within --tolerance: sums in another order
differ in their last bits, and training lets that grow, the more the faster it learns. SIGTERM,
besides, must lose no step. Of several processes one is killed, and the others must end by
themselves. Exit status 1 if not so; with --max_secs, 75 once they are over: the same command goes
on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from absl import app, flags

from tools import disturbed_run
from tools.disturbed_run import Kill, Layout, News, Run, Story

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared data folder.", required=True)
_OUT = flags.DEFINE_string("out", None, "A folder for both runs.", required=True)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_KILLS = flags.DEFINE_integer("kills", 30, "How often.")
_SIGNAL = flags.DEFINE_enum("signal", "KILL", ["KILL", "TERM"], "By which signal.")
_LAYOUTS = flags.DEFINE_list("layouts", ["2"], "Partitions, or partitions/processes; in turn.")
_TOLERANCE = flags.DEFINE_float("tolerance", 0.02, "Of losses, relative, if layouts change.")
_SEED = flags.DEFINE_integer("seed", 1, "Of the moments.")
_MAX_SECS = flags.DEFINE_float("max_secs", math.inf, "End after the kill in which they are over.")

_MOMENTS = ("start", "step", "save")
_GOES_ON = 75  # The exit status before it is done.
_OTHERS_END_SECS = 60.0
_MOST_CALLS = 4  # Of a process before it is killed.
_SHARE_OF_CALL = {"step": 1.0, "save": 0.2}  # How long after it is in that moment, at most.
_POLL_SECS = 0.005


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


def main(argv: list[str]) -> None:
    del argv
    began = time.monotonic()
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    asked = (_MODEL, _DATA_DIR, _SET, _KILLS, _SIGNAL, _LAYOUTS, _SEED)
    story = Story(out / "soak.jsonl", {flag.name: flag.value for flag in asked})
    trainer_flags = (
        f"--model={_MODEL.value}",
        f"--data_dir={_DATA_DIR.value}",
        *(f"--set={setting}" for setting in _SET.value),
    )
    whole, disturbed = (Run(out / name, trainer_flags) for name in ("whole", "disturbed"))
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
    sent = signal.Signals[f"SIG{_SIGNAL.value}"]
    before, news = max(run.losses(), default=0), News(run)
    processes = run.start(layout)
    with _ended(processes):
        began = time.monotonic()
        moment, first_call_secs = _wait(wish, news, processes)
        killed = rng.choice(processes)
        # Those that have not met yet would wait for each other: there all are killed.
        for process in processes if moment == "start" else [killed]:
            process.send_signal(sent)
        status, ended = killed.wait(), time.monotonic()
        others = [
            process.wait(timeout=_OTHERS_END_SECS) for process in processes if process is not killed
        ]
    after = max(run.losses(), default=0)
    disturbed_run.check_ended(sent, moment, status, others)
    if sent == signal.SIGTERM and run.saved_step() != after:
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


def _wait(
    wish: _Wish, news: News, processes: Sequence[subprocess.Popen]
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


if __name__ == "__main__":
    app.run(main)
