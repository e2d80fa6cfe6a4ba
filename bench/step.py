"""Times a train step beside PyTorch and NumPy's matrix-product rate.

    python -m bench.step [--model=toy.MoE8E8L] [--partitions=1,2,4] [--group_sizes=64,256]
    python -m bench.step --platform=cuda --torch_python=python3 --partitions=1

A first step without randomness checks that the loss and the gradient's norm equal the peer's.
"""

import tempfile

import jax

from bench import beside_torch, synthetic
from lingvo_gshard import cli
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.model import flops, step_products
from lingvo_gshard.model.spec import Mode

# The relative tolerances of the loss and the gradient's norm. GPUs multiply float32 numbers in
# TF32, which keeps 10 bits of a factor, and may send a token to another expert.
_TOLERANCES = {"cpu": 1e-4, "gpu": 5e-3}


def main() -> None:
    beside_torch.compare("train step", "step", _step)


def _step(params: Params, num_partitions: int) -> beside_torch.Work:
    _check_peer(params, num_partitions)
    batch = synthetic.training_batch(params)
    run, _, state = _compiled(params, num_partitions, batch)
    batches = run.place("batches", batch.Transform(lambda x: x[None]))
    newest = state

    def call() -> None:
        nonlocal newest
        result = run(NestedMap(newest), batches)
        result.metrics.loss.block_until_ready()
        newest = result.state

    specs = params.input.cls.batch_specs(params.input)
    gflop = flops.step_flops(step_products.products_of(params.task, specs)) / 1e9
    target_tokens = params.input.batch_size * params.input.target_len
    return beside_torch.Work(call, state.theta, batch, gflop, target_tokens)


def _check_peer(params: Params, num_partitions: int) -> None:
    """Compares the loss and the gradient's norm of a step without dropout or random routing."""
    if params.task.product_dtype != "float32":  # Rounding may send a token to another expert.
        return

    params = _without_randomness(params)
    batch = synthetic.training_batch(params)
    run, _, state = _compiled(params, num_partitions, batch)
    with (
        tempfile.TemporaryDirectory() as folder,
        beside_torch.start_worker(folder, params, state.theta, batch) as worker,
    ):
        expected_metrics = worker.ask("loss")

    # Training donates the state; the peer has read it before.
    metrics = run(NestedMap(state), batch.Transform(lambda x: x[None])).metrics
    tolerance = _TOLERANCES[jax.default_backend()]
    for name, expected in expected_metrics.items():
        actual = float(metrics[name][0])
        print(f"{name}: ours {actual:.6f}, the peer's {expected:.6f}", flush=True)
        if not abs(actual - expected) <= tolerance * abs(expected):
            raise AssertionError(f"{name}: ours is {actual}, the peer's {expected}.")


def _without_randomness(params: Params) -> Params:
    params = params.Copy()
    for stack in (params.task.encoder, params.task.decoder):
        stack.moe.gating.second_expert = SecondExpert.ALL
        stack.layer.attention.dropout.rate = 0.0
        stack.layer.residual_dropout.rate = 0.0
    params.task.input_dropout.rate = 0.0
    return params


def _compiled(params: Params, num_partitions: int, batch: NestedMap):
    """Returns the compiled program of one step, the model and its initial state."""
    model, state = synthetic.model_and_state(params, num_partitions)
    programs = synthetic.programs(model)
    return programs.get(Mode.TRAIN, synthetic.specs_of(batch)), model, state


if __name__ == "__main__":
    cli.run("step", main)
