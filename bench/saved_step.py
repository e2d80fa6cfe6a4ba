"""A saved train step, run by JAX alone: steps/s and loss on whatever device JAX finds.

    python -m bench.saved_step --make=FOLDER [--model=toy.MoE8E4L] [--batch_size=8]
    python -m bench.saved_step --run=FOLDER

The first needs TensorFlow, the second JAX alone: on another machine, with a GPU too, it needs the
folder, this repository and its jax and numpy. JAX_PLATFORMS=cpu runs it on the CPU there.
"""

from __future__ import annotations

import pathlib
import time

from absl import app, flags

from lingvo_gshard.spmd import environment

_MAKE = flags.DEFINE_string("make", None, "Saves the programs and a batch in this folder.")
_RUN = flags.DEFINE_string("run", None, "Runs what --make saved in this folder.")
_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "For --make: a registered experiment.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "For --make: rows; None: the experiment's.")
_STEPS_PER_CALL = flags.DEFINE_integer("steps_per_call", 5, "For --make: steps in one program.")
_CALLS = flags.DEFINE_integer("calls", 4, "For --run: timed calls, after one that is not.")

_INITIALIZE, _TRAIN, _BATCHES = "initialize.program", "train.program", "batches.npz"


def main(argv: list[str]) -> None:
    del argv
    if (_MAKE.value is None) == (_RUN.value is None):
        raise app.UsageError("give --make=FOLDER or --run=FOLDER")
    if _MAKE.value is not None:
        environment.prepare(num_devices=1)
        _make(pathlib.Path(_MAKE.value))
    else:
        environment.prepare()
        _run(pathlib.Path(_RUN.value))


def _make(folder: pathlib.Path) -> None:
    import numpy as np

    from bench import synthetic
    from lingvo_gshard.model.translation_model import TranslationModel
    from lingvo_gshard.sharding.layout import Partitioning
    from lingvo_gshard.sharding.mesh import Mesh
    from lingvo_gshard.spmd import lowering
    from lingvo_gshard.train import steps

    params = synthetic.experiment(_MODEL.value)
    if _BATCH_SIZE.value is not None:
        params.input.batch_size = _BATCH_SIZE.value
    partitioning = Partitioning.from_dict(Mesh.flat(1), params.sharding)
    model = TranslationModel(params, partitioning)
    batch = synthetic.training_batch(params)
    step = steps.train_step(model.model_fn, params)
    trainer = steps.trainer(
        step, model.state_spec, synthetic.specs_of(batch), _STEPS_PER_CALL.value, partitioning
    )
    folder.mkdir(parents=True, exist_ok=True)
    initializer = steps.initializer(model.init_state, model.state_spec)
    lowering.export(initializer, partitioning).save(folder / _INITIALIZE)
    lowering.export(trainer, partitioning).save(folder / _TRAIN)
    # The same batch at every step: the loss shows that the step learns.
    repeated = batch.Transform(lambda x: np.stack([x] * _STEPS_PER_CALL.value))
    np.savez(folder / _BATCHES, **dict(repeated.FlattenItems()))
    print(f"{folder}: {_MODEL.value}, {_STEPS_PER_CALL.value} steps in a program")


def _run(folder: pathlib.Path) -> None:
    import jax
    import numpy as np

    from lingvo_gshard.core.nested_map import NestedMap
    from lingvo_gshard.spmd import program
    from lingvo_gshard.spmd.executable import compile_program

    began = time.perf_counter()
    initialize, train = (
        compile_program(program.load(folder / name)) for name in (_INITIALIZE, _TRAIN)
    )
    device = jax.devices()[0]
    print(
        f"{device.platform} {device.device_kind}: compiled in {time.perf_counter() - began:.1f} s"
    )
    spec = train.program.args[train.program.arg_names.index("batches")]
    with np.load(folder / _BATCHES) as arrays:
        batches = spec.Pack(arrays[path] for path, _ in spec.FlattenItems())
    batches = train.place("batches", batches)
    state = initialize(NestedMap(seed=np.array([1, 0], np.int32))).state
    losses = []
    for call in range(1 + _CALLS.value):
        if call == 1:
            began = time.perf_counter()
        result = train(state, batches)
        state = result.state
        losses += np.asarray(result.metrics.loss).tolist()  # Waits for the device.
    rate = _CALLS.value * len(losses) / (1 + _CALLS.value) / (time.perf_counter() - began)
    print(f"{rate:.3f} steps/s; loss {losses[0]:.4f} at first, {losses[-1]:.4f} at {len(losses)}")


if __name__ == "__main__":
    app.run(main)
