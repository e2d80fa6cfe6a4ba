"""Kills a training run again and again, and compares its result with an undisturbed run's.

    python -m tools.soak --data_dir=DATA --out=OUT --kills=30 --set=train.max_steps=200 \
        --set=train.iterations_per_loop=5 --set=train.save_checkpoints_steps=10
    python -m tools.soak --data_dir=DATA --out=OUT --kills=10 --signal=TERM
    python -m tools.soak --data_dir=DATA --out=OUT --kills=8 --layouts=2,4/2,1,4 \
        --tolerance=1e-3 --set=optimizer.schedule.multiplier=0.1

A third of the kills hit a process while it starts, a third in a step and a third in a save, each at
a random moment. With one layout, the losses of all calls and the final state must be equal bit for
bit. Several layouts take turns, and the losses must agree within --tolerance: sums in another order
differ in their last bits, and training amplifies this, the more the higher the learning rate is.
SIGTERM must not lose a step. If a run has several processes, one of them is killed, and the others
must end by themselves.

The exit status is 0 if the runs agree, 1 if they do not, and 75 if --max_secs passed first.
After an interruption, the same command continues the test.
"""

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
from tools.disturbed_run import Kill, KillLog, Layout, ProgressWatcher, Run

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "A prepared data folder.", required=True)
_OUT = flags.DEFINE_string("out", None, "The folder for both runs.", required=True)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_KILLS = flags.DEFINE_integer("kills", 30, "The number of kills.")
_SIGNAL = flags.DEFINE_enum("signal", "KILL", ["KILL", "TERM"], "The signal that is sent.")
_LAYOUTS = flags.DEFINE_list(
    "layouts", ["2"], "Numbers of partitions, or partitions/processes, that take turns."
)
_TOLERANCE = flags.DEFINE_float(
    "tolerance", 0.02, "The largest relative difference of losses between layouts."
)
_SEED = flags.DEFINE_integer("seed", 1, "The seed of the random moments.")
_MAX_SECS = flags.DEFINE_float(
    "max_secs", math.inf, "Stop after the first kill that ends later than this many seconds."
)

_MOMENTS = ("start", "step", "save")
_UNFINISHED = 75  # The exit status after --max_secs.
_OTHERS_END_SECS = 60.0
_MAX_CALLS = 4  # The most calls of a process before it is killed.
# The longest delay of a kill after its moment has begun, as a share of a call's time.
_MAX_DELAY = {"step": 1.0, "save": 0.2}
_POLL_SECS = 0.005


@dataclasses.dataclass(frozen=True)
class _KillPlan:
    """The time at which a process will be killed.

    Attributes:
      moment: "start", "step" or "save".
      start_secs: for "start", the seconds after the start of the process.
      num_calls: for the others, the least number of calls before the moment.
      delay: for the others, the delay after the moment begins, as a share of the longest delay.
    """

    moment: str
    start_secs: float
    num_calls: int
    delay: float


def main(argv: list[str]) -> None:
    del argv
    began = time.monotonic()
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    settings = (_MODEL, _DATA_DIR, _SET, _KILLS, _SIGNAL, _LAYOUTS, _SEED)
    log = KillLog(out / "soak.jsonl", {flag.name: flag.value for flag in settings})
    trainer_flags = (
        f"--model={_MODEL.value}",
        f"--data_dir={_DATA_DIR.value}",
        *(f"--set={setting}" for setting in _SET.value),
    )
    whole = Run(out / "whole", trainer_flags)
    disturbed = Run(out / "disturbed", trainer_flags)
    layouts = [Layout.parse(text) for text in _LAYOUTS.value]

    if "whole" not in log.run_secs:
        log.add_run("whole", _run_to_end(whole, layouts[0]))
    print(f"The undisturbed run took {log.run_secs['whole']:.0f} s.", flush=True)

    while "disturbed" not in log.run_secs:
        number = len(log.kills)
        if time.monotonic() - began > _MAX_SECS.value:
            print(f"{number} kills so far; run the same command again to continue.")
            sys.exit(_UNFINISHED)

        # The run ends undisturbed after all kills, or if all its steps are done.
        layout = layouts[number % len(layouts)]
        if number >= _KILLS.value or disturbed.saved_step() == whole.saved_step():
            log.add_run("disturbed", _run_to_end(disturbed, layout))
            break

        rng = random.Random(f"{_SEED.value} {number}")
        plan = _kill_plan(number, rng, log.start_secs(whole.calls()[0]["wall_secs"]))
        kill = _run_and_kill(disturbed, layout, plan, rng)
        log.add_kill(kill)
        steps = f"steps {kill.before} to {kill.after}"
        print(f"Kill {number + 1}: in a {kill.moment}, {steps}, status {kill.status}", flush=True)

    _print_summary(log)
    sys.exit(0 if _runs_agree(whole, disturbed) else 1)


def _run_and_kill(run: Run, layout: Layout, plan: _KillPlan, rng: random.Random) -> Kill:
    """Continues the run, kills one of its processes as planned, and checks all exit statuses."""
    sent = signal.Signals[f"SIG{_SIGNAL.value}"]
    before = max(run.losses(), default=0)
    watcher = ProgressWatcher(run)
    processes = run.start(layout)

    with _killed_at_exit(processes):
        began = time.monotonic()
        moment, first_call_secs = _wait_for_moment(plan, watcher, processes)

        killed = rng.choice(processes)
        # Processes that are not connected yet would wait for each other, so all are killed.
        for process in processes if moment == "start" else [killed]:
            process.send_signal(sent)
        status = killed.wait()
        ended = time.monotonic()
        other_statuses = [
            process.wait(timeout=_OTHERS_END_SECS) for process in processes if process is not killed
        ]

    # After SIGTERM, the last step is saved.
    after = max(run.losses(), default=0)
    disturbed_run.check_exit_statuses(sent, moment, status, other_statuses)
    if sent == signal.SIGTERM and run.saved_step() != after:
        raise app.Error(f"The run completed step {after}, but saved only step {run.saved_step()}.")

    return Kill(
        moment,
        before,
        after,
        secs=ended - began,
        others_secs=time.monotonic() - ended,
        first_call_secs=first_call_secs,
        cut_short=watcher.has_incomplete_checkpoint(),
        status=status,
    )


def _kill_plan(number: int, rng: random.Random, start_secs: float) -> _KillPlan:
    return _KillPlan(
        _MOMENTS[number % len(_MOMENTS)],
        start_secs * rng.random(),
        rng.randint(1, _MAX_CALLS),
        rng.random(),
    )


def _wait_for_moment(
    plan: _KillPlan, watcher: ProgressWatcher, processes: Sequence[subprocess.Popen]
) -> tuple[str, float | None]:
    """Waits until the planned moment, or until a process has ended.

    Returns:
      The actual moment, and the seconds from the start to the end of the first call, or None
      before that end.
    """
    began = time.monotonic()
    first_call_secs = None
    while all(process.poll() is None for process in processes):
        time.sleep(_POLL_SECS)
        calls = watcher.calls()
        if calls and first_call_secs is None:
            first_call_secs = time.monotonic() - began

        if plan.moment == "start":
            if calls or time.monotonic() - began >= plan.start_secs:
                return "step" if calls else "start", first_call_secs
        elif len(calls) >= plan.num_calls:
            is_saving = watcher.has_incomplete_checkpoint()
            if is_saving == (plan.moment == "save"):
                time.sleep(plan.delay * calls[-1]["secs"] * _MAX_DELAY[plan.moment])
                is_saving = watcher.has_incomplete_checkpoint()
                return "save" if is_saving else "step", first_call_secs
    return "step" if first_call_secs else "start", first_call_secs


@contextlib.contextmanager
def _killed_at_exit(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
    """A context at whose end the processes that still run are killed."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run_to_end(run: Run, layout: Layout) -> float:
    """Continues the run until it finishes; returns the seconds that it took."""
    began = time.monotonic()
    processes = run.start(layout)
    with _killed_at_exit(processes):
        statuses = [process.wait() for process in processes]
    if any(statuses):
        log = run.folder.with_suffix(".log").read_text(encoding="utf-8")
        raise app.Error(f"The trainer exited with {statuses}: {log[-2000:]}")
    return time.monotonic() - began


def _print_summary(log: KillLog) -> None:
    """Prints the number of kills at each kind of moment, and the time that the run lost."""
    num_kills = len(log.kills)
    counts = collections.Counter(kill.moment for kill in log.kills)
    moments = ", ".join(f"{count} in a {moment}" for moment, count in sorted(counts.items()))
    cut_short = sum(kill.cut_short for kill in log.kills)
    print(f"SIG{_SIGNAL.value} was sent {num_kills} times: {moments}.")
    print(f"{cut_short} of the kills left an incomplete checkpoint.")

    killed_secs = sum(kill.secs + kill.others_secs for kill in log.kills)
    secs = log.run_secs["disturbed"] + killed_secs
    lost = secs - log.run_secs["whole"]
    print(f"The disturbed run took {secs:.0f} s, {lost:.0f} s longer than the undisturbed one,")
    print(f"which is {lost / max(num_kills, 1):.1f} s for each kill.")

    if any(Layout.parse(text).processes > 1 for text in _LAYOUTS.value):
        slowest = max((kill.others_secs for kill in log.kills), default=0.0)
        print(f"The other processes ended within {slowest:.1f} s.")


def _runs_agree(whole: Run, disturbed: Run) -> bool:
    """Prints a comparison of the two runs; returns whether they agree as required."""
    expected = whole.losses()
    actual = disturbed.losses()
    differences = [
        abs(actual[step] - loss) / abs(loss) for step, loss in expected.items() if step in actual
    ]
    largest = max(differences, default=math.inf)

    print(f"Losses of {len(expected)} calls: the largest relative difference is {largest:.3g}.")
    print(f"{disturbed.num_damaged()} checkpoints were found damaged.")
    has_same_steps = expected.keys() == actual.keys()
    if not has_same_steps:
        print("The runs logged different steps.")

    # Sums over different numbers of devices differ in their rounding.
    if len(set(_LAYOUTS.value)) > 1:
        return has_same_steps and largest <= _TOLERANCE.value
    is_equal = whole.fingerprints() == disturbed.fingerprints()
    print(f"Final state: {'equal bit for bit' if is_equal else 'DIFFERENT'}.")
    return has_same_steps and is_equal and largest == 0.0


if __name__ == "__main__":
    app.run(main)
