"""A train step beside PyTorch's and numpy's matrix-product rate.

    python -m bench.step [--model=toy.MoE8E8L] [--partitions=1,2,4] [--group_sizes=64,256]

Without randomness, ours has the peer's loss and gradient norm: that is checked first.
"""

from __future__ import annotations

import pathlib
import tempfile

from absl import app

from bench.beside_torch import Work, compare
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap

_TOLERANCE = 1e-4  # Of the loss and the gradient's norm, relative.


def main(argv: list[str]) -> None:
    compare("train step", "step", _step)


def _step(params: Params, num_partitions: int) -> Work:
    from bench import synthetic
    from lingvo_gshard.model import flops

    _check_peer(params, num_partitions)
    run, model, state = _compiled(params, num_partitions)
    batch = synthetic.training_batch(params)
    batches = run.place("batches", batch.Transform(lambda x: x[None]))

    newest = state

    def call() -> None:
        nonlocal newest
        result = run(NestedMap(newest), batches)
        result.metrics.loss.block_until_ready()
        newest = result.state

    sizes = [params.input.Get(name) for name in ("batch_size", "source_len", "target_len")]
    gflop = flops.train_step_flops(model.task, *sizes) / 1e9
    return Work(call, state.theta, batch, gflop, sizes[0] * sizes[2])


def _check_peer(params: Params, num_partitions: int) -> None:
    """One step without dropout or random routing: ours has the peer's loss and gradient norm."""
    from bench import synthetic
    from bench.peer import Peer

    params = _without_randomness(params)
    run, _, state = _compiled(params, num_partitions)
    batch = synthetic.training_batch(params)
    with (
        tempfile.TemporaryDirectory() as folder,
        Peer(pathlib.Path(folder), params, state.theta, batch) as peer,
    ):
        theirs = peer.ask("loss")
    metrics = run(NestedMap(state), batch.Transform(lambda x: x[None])).metrics
    for name, expected in theirs.items():
        got = float(metrics[name][0])
        if abs(got - expected) > _TOLERANCE * abs(expected):
            raise AssertionError(f"{name}: {got} is ours, {expected} the peer's.")


def _without_randomness(params: Params) -> Params:
    from lingvo_gshard.layers.gating import SecondExpert

    params = params.Copy()
    for stack in (params.task.encoder, params.task.decoder):
        stack.moe.second_expert = SecondExpert.ALL
        stack.layer.attention.dropout.rate = stack.layer.residual_dropout.rate = 0.0
    params.task.input_dropout.rate = 0.0
    return params


def _compiled(params: Params, num_partitions: int):
    """The compiled step of a single batch, the model and its first state."""
    from bench import synthetic
    from lingvo_gshard.spmd import lowering
    from lingvo_gshard.spmd.executable import compile_program
    from lingvo_gshard.train import steps

    model, state = synthetic.model_and_state(params, num_partitions)
    batch_spec = synthetic.specs_of(synthetic.training_batch(params))
    step = steps.train_step(model.model_fn, params)
    annotated = steps.trainer(step, model.state_spec, batch_spec, 1, model.partitioning)
    return compile_program(lowering.export(annotated, model.partitioning)), model, state


if __name__ == "__main__":
    app.run(main)
