"""Runs a saved train step with JAX alone: steps/s and loss on JAX's default device.

    python -m bench.saved_step --make=FOLDER [--model=toy.MoE8E4L] [--batch_size=8]
    python -m bench.saved_step --run=FOLDER

The first command needs TensorFlow. The second one needs only the folder, this repository, jax and
numpy, so it can run on another machine, such as one with a GPU. JAX_PLATFORMS=cpu makes it use the
CPU.
"""

import pathlib
import time

import jax
import numpy as np
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import program
from lingvo_gshard.spmd.executable import compile_program
from xla_spmd.runtime import environment

_MAKE = flags.DEFINE_string("make", None, "The folder for the programs and a batch.")
_RUN = flags.DEFINE_string("run", None, "The folder of the programs to run.")
_MODEL = flags.DEFINE_string("model", "toy.MoE8E4L", "For --make: a registered experiment.")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "For --make: the number of rows; by default the experiment's."
)
_STEPS_PER_CALL = flags.DEFINE_integer("steps_per_call", 5, "For --make: steps in one program.")
_CALLS = flags.DEFINE_integer("calls", 4, "For --run: timed calls, after an untimed one.")

_INITIALIZE = "initialize.program"
_TRAIN = "train.program"
_BATCHES = "batches.npz"


def main() -> None:
    if (_MAKE.value is None) == (_RUN.value is None):
        raise ValueError("give --make=FOLDER or --run=FOLDER")
    if _MAKE.value is not None:
        environment.prepare(num_devices=1)
        _make(pathlib.Path(_MAKE.value))
    else:
        _run(pathlib.Path(_RUN.value))


def _make(folder: pathlib.Path) -> None:
    # These modules import TensorFlow, which --run does not need.
    from bench import synthetic
    from lingvo_gshard.model.spec import Mode

    params = synthetic.experiment(_MODEL.value)
    if _BATCH_SIZE.value is not None:
        params.input.batch_size = _BATCH_SIZE.value
    model = synthetic.partitioned_model(params, 1)
    batch = synthetic.training_batch(params)

    programs = synthetic.programs(model)
    batch_spec = synthetic.specs_of(batch)
    num_steps = _STEPS_PER_CALL.value
    trainer = programs.exported(Mode.TRAIN, batch_spec, num_steps)
    folder.mkdir(parents=True, exist_ok=True)
    programs.initializer().save(folder / _INITIALIZE)
    trainer.save(folder / _TRAIN)

    # Every step sees the same batch, so the loss shows whether the step learns.
    repeated = batch.Transform(lambda x: np.stack([x] * num_steps))
    np.savez(folder / _BATCHES, **dict(repeated.FlattenItems()))
    print(f"{folder}: {_MODEL.value}, {num_steps} steps in a program")


def _run(folder: pathlib.Path) -> None:
    began = time.perf_counter()
    initialize = compile_program(program.load(folder / _INITIALIZE))
    train = compile_program(program.load(folder / _TRAIN))
    device = jax.devices()[0]
    compile_secs = time.perf_counter() - began
    print(f"{device.platform} {device.device_kind}: compiled in {compile_secs:.1f} s")

    spec = train.program.args[train.program.arg_names.index("batches")]
    with np.load(folder / _BATCHES) as arrays:
        batches = spec.Pack(arrays[path] for path, _ in spec.FlattenItems())
    batches = train.place("batches", batches)
    state = initialize(NestedMap(seed=np.array([1, 0], np.int32))).state

    losses = []
    for call in range(1 + _CALLS.value):
        if call == 1:  # The first call is not timed.
            began = time.perf_counter()
        result = train(state, batches)
        state = result.state
        losses += np.asarray(result.metrics.loss).tolist()  # Waits for the device.
    secs = time.perf_counter() - began

    steps_per_call = len(losses) / (1 + _CALLS.value)
    rate = _CALLS.value * steps_per_call / secs
    print(f"{rate:.3f} steps/s; loss {losses[0]:.4f} at first, {losses[-1]:.4f} at {len(losses)}")


if __name__ == "__main__":
    cli.run("saved_step", main)
