"""What the training loop costs over its device program, and checkpoints over plain files.

    python -m bench.loop [--model=toy.MoE8E4L] [--partitions=2] [--iterations=5] [--calls=20] \
        [--checkpoint_model=toy.MoE8E8L] [--saves=5]

Calls of the loop, its feed, log and summaries included, take turns with calls of the bare program
on batches that lie on the devices. Saves, restores and copies of a checkpoint's files, of a state
of another model, 100 MiB by default, take turns too. Medians count.
"""

from __future__ import annotations

import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

from absl import app, flags, logging

from lingvo_gshard.spmd import environment

_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "A registered experiment, to train.")
_CHECKPOINT_MODEL = flags.DEFINE_string("checkpoint_model", "toy.MoE8E8L", "One to save.")
_PARTITIONS = flags.DEFINE_integer("partitions", 2, "Devices.")
_ITERATIONS = flags.DEFINE_integer("iterations", 5, "K, training steps of a call.")
_CALLS = flags.DEFINE_integer("calls", 20, "Timed calls of each.")
_SAVES = flags.DEFINE_integer("saves", 5, "Timed saves, restores and copies.")


def main(argv: list[str]) -> None:
    environment.prepare(_PARTITIONS.value)
    logging.set_verbosity(logging.WARNING)  # Orbax's news.
    print(f"{_MODEL.value}, {_PARTITIONS.value} devices, {_ITERATIONS.value} steps a call")
    with tempfile.TemporaryDirectory() as folder:
        loop, bare = _time_loop(folder)
        print(
            f"call in the loop {loop:.4f} s, bare {bare:.4f} s: {loop / bare - 1:+.1%}", flush=True
        )
        _time_checkpoints(pathlib.Path(folder, "saves"))


def _time_loop(folder: str) -> tuple[float, float]:
    """Median seconds of a call in the loop and of one of the bare program."""
    import numpy as np

    from bench import synthetic
    from lingvo_gshard.spmd import lowering
    from lingvo_gshard.spmd.executable import compile_program
    from lingvo_gshard.train import steps
    from lingvo_gshard.train.estimator import TPUEstimator
    from lingvo_gshard.train.hooks import TrainHook

    params, size = synthetic.experiment(_MODEL.value), _ITERATIONS.value
    model, state = synthetic.model_and_state(params, _PARTITIONS.value)
    batch = synthetic.training_batch(params)
    specs = synthetic.specs_of(batch)
    step = steps.train_step(model.model_fn, params)
    annotated = steps.trainer(step, model.state_spec, specs, size, model.partitioning)
    run = compile_program(lowering.export(annotated, model.partitioning))
    batches = run.place("batches", batch.Transform(lambda x: np.stack([x] * size)))

    class _TakesTurns(TrainHook):
        """The last hook: between its end and its next begin lies a call of the loop alone."""

        def __init__(self) -> None:
            self.loop_secs: list[float] = []
            self.bare_secs: list[float] = []
            self._state, self._ended = state, None

        def after_call(self, call) -> None:
            began = time.perf_counter()
            if self._ended is not None:
                self.loop_secs.append(began - self._ended)
            result = run(self._state, batches)
            float(result.metrics.loss[0])  # Waits for the devices.
            self._state, self._ended = result.state, time.perf_counter()
            self.bare_secs.append(self._ended - began)

    hook = _TakesTurns()
    params.train.iterations_per_loop = size
    estimator = TPUEstimator(
        model.model_fn,
        folder,
        params=params,
        partitioning=model.partitioning,
        state_spec=model.state_spec,
        init_fn=model.init_state,
        show_progress=False,
    )
    estimator.train(
        lambda _: synthetic.Endless(batch, specs), steps=size * (_CALLS.value + 1), hooks=[hook]
    )
    return statistics.median(hook.loop_secs), statistics.median(hook.bare_secs[1:])


def _time_checkpoints(folder: pathlib.Path) -> None:
    from bench import synthetic
    from lingvo_gshard.spmd import specs
    from lingvo_gshard.train import checkpoints
    from lingvo_gshard.train.checkpoints import Checkpoints, Contents

    params = synthetic.experiment(_CHECKPOINT_MODEL.value)
    model, state = synthetic.model_and_state(params, _PARTITIONS.value)
    mebibytes = sum(x.nbytes for x in state.Flatten()) / 2**20
    mesh = specs.device_mesh(model.partitioning)
    shardings = specs.shardings(model.partitioning, model.state_spec, mesh)
    contents = Contents(params.ToText(), model.partitioning, model.state_spec)
    secs: dict[str, list[float]] = {name: [] for name in ("blocked", "save", "restore", "copy")}

    def timed(name: str, what: Callable[[], object]) -> None:
        began = time.perf_counter()
        what()
        secs[name].append(time.perf_counter() - began)

    with Checkpoints(folder, contents) as saved:
        for i in range(_SAVES.value + 1):
            timed("blocked", lambda i=i: saved.save(i, state, {}))
            timed("save", saved.wait)
            secs["save"][-1] += secs["blocked"][-1]
            timed("restore", lambda i=i: saved.restore(i, model.state_spec, shardings))
            one = checkpoints.folder(folder) / str(i)
            timed("copy", lambda i=i, one=one: shutil.copytree(one, folder / f"copy{i}"))
    # The first one of each compiles.
    median = {name: statistics.median(each[1:]) for name, each in secs.items()}
    print(
        f"{_CHECKPOINT_MODEL.value}, {mebibytes:.1f} MiB in {len(state.Flatten())} arrays: a save "
        f"blocks training for {median['blocked']:.3f} s, is whole after {median['save']:.3f} s"
    )
    for name in ("restore", "copy"):
        print(f"{name:<8}{mebibytes / median[name]:>8.0f} MiB/s")


if __name__ == "__main__":
    app.run(main)
