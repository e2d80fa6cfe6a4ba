"""The training loop's overhead over its program, and the speed of checkpoints over plain copies.

    python -m bench.loop [--model=toy.MoE8E4L] [--partitions=2] [--iterations=5] [--calls=20] \
        [--checkpoint_model=toy.MoE8E8L] [--saves=5]

Calls of the loop, which include its feed, log and summaries, alternate with calls of the bare
program on batches that are on the devices already. Saves, restores and file copies of a checkpoint
alternate, too; the checkpoint is another model's, by default with 100 MiB. Medians count.
"""

import collections
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from absl import flags, logging

from bench import synthetic
from lingvo_gshard import cli
from lingvo_gshard.checkpoints import saved_steps
from lingvo_gshard.checkpoints.checkpoints import Checkpoints, Contents
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.spmd import devices, specs
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.train.estimator import Estimator
from lingvo_gshard.train.hooks import TrainCall, TrainHook
from xla_spmd.files import table
from xla_spmd.runtime import environment

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "The registered experiment to train.")
_CHECKPOINT_MODEL = flags.DEFINE_string(
    "checkpoint_model", "toy.MoE8E8L", "The registered experiment whose state is saved."
)
_PARTITIONS = flags.DEFINE_integer("partitions", 2, "The number of devices.")
_ITERATIONS = flags.DEFINE_integer("iterations", 5, "K, the training steps of a call.")
_CALLS = flags.DEFINE_integer("calls", 20, "The number of timed calls of each.")
_SAVES = flags.DEFINE_integer("saves", 5, "The number of timed saves, restores and copies.")


def main() -> None:
    environment.prepare(_PARTITIONS.value)
    devices.start()
    logging.set_verbosity(logging.WARNING)  # Orbax logs every save.
    print(f"{_MODEL.value}; devices: {_PARTITIONS.value}; steps in a call: {_ITERATIONS.value}")
    with tempfile.TemporaryDirectory() as folder:
        loop, bare = _time_loop(folder)
        overhead = f"{loop / bare - 1:+.1%}"
        print(f"call in the loop {loop:.4f} s, bare {bare:.4f} s: {overhead}", flush=True)
        _time_checkpoints(pathlib.Path(folder, "saves"))


class _BareCalls(TrainHook):
    """Times the loop's calls, and a call of the bare program after each of them.

    The hook must be the last one, so that the time from its end to its next call is the loop's.
    """

    def __init__(self, run: Executable, state: NestedMap, batches: NestedMap) -> None:
        self.loop_secs: list[float] = []
        self.bare_secs: list[float] = []
        self._run = run
        self._state = state
        self._batches = batches
        self._ended: float | None = None

    def after_call(self, call: TrainCall) -> None:
        began = time.perf_counter()
        if self._ended is not None:
            self.loop_secs.append(began - self._ended)
        result = self._run(self._state, self._batches)
        float(result.metrics.loss[0])  # Waits for the devices.
        self._state = result.state
        self._ended = time.perf_counter()
        self.bare_secs.append(self._ended - began)


def _time_loop(folder: str) -> tuple[float, float]:
    """Returns the median seconds of a call in the loop and of a call of the bare program."""
    params = synthetic.experiment(_MODEL.value)
    num_steps = _ITERATIONS.value
    params.train.iterations_per_loop = num_steps

    # The bare program has a separate state, and its batches are on the devices.
    model, state = synthetic.model_and_state(params, _PARTITIONS.value)
    batch = synthetic.training_batch(params)
    programs = synthetic.programs(model)
    run = programs.get(Mode.TRAIN, synthetic.specs_of(batch), num_steps)
    batches = run.place("batches", batch.Transform(lambda x: np.stack([x] * num_steps)))
    hook = _BareCalls(run, state, batches)

    estimator = Estimator(model, folder, params=params, show_progress=False)
    estimator.train(
        lambda _: synthetic.RepeatedBatch(batch),
        steps=num_steps * (_CALLS.value + 1),
        hooks=[hook],
    )

    # The hook cannot time the loop's first call, so the bare call after it is left out, too.
    return statistics.median(hook.loop_secs), statistics.median(hook.bare_secs[1:])


def _time_checkpoints(folder: pathlib.Path) -> None:
    """Prints the speed of saving, restoring and copying checkpoints."""
    params = synthetic.experiment(_CHECKPOINT_MODEL.value)
    model, state = synthetic.model_and_state(params, _PARTITIONS.value)
    mebibytes = sum(array.nbytes for array in state.Flatten()) / 2**20
    mesh = specs.device_mesh(model.partitioning)
    shardings = specs.shardings(model.partitioning, model.state_spec, mesh)
    contents = Contents(params, model.partitioning, model.state_spec)

    secs = collections.defaultdict(list)

    def timed(name: str, fn: Callable[..., object], *args: object) -> None:
        began = time.perf_counter()
        fn(*args)
        secs[name].append(time.perf_counter() - began)

    with Checkpoints(folder, contents) as saved:
        for i in range(_SAVES.value + 1):
            timed("blocked", saved.save, i, state, {})
            timed("finished", saved.wait)
            timed("restore", saved.restore, i, model.state_spec, shardings)
            checkpoint = saved_steps.folder(folder) / str(i)
            timed("copy", shutil.copytree, checkpoint, folder / f"copy{i}")

    # A save blocks training while it copies from the devices, and then continues in a thread.
    secs["save"] = [sum(parts) for parts in zip(secs["blocked"], secs["finished"], strict=True)]
    # The first call of each is left out, because it compiles.
    median = {name: statistics.median(calls[1:]) for name, calls in secs.items()}
    print(
        f"{_CHECKPOINT_MODEL.value}, {mebibytes:.1f} MiB in {len(state.Flatten())} arrays: a save "
        f"blocks training for {median['blocked']:.3f} s and is complete after "
        f"{median['save']:.3f} s"
    )
    rates = [(name, f"{mebibytes / median[name]:.0f}") for name in ("restore", "copy")]
    print(table.text([("", "MiB/s"), *rates]))


if __name__ == "__main__":
    cli.run("loop", main)
