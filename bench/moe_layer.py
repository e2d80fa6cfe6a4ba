"""An MoE layer forward and backward beside PyTorch's and numpy's matrix-product rate.

    python -m bench.moe_layer [--model=toy.MoE8E8L] [--partitions=1,2,4] [--group_sizes=64,256]

The layer is the encoder's first with experts. That both compute the same, bench.step checks.
"""

from __future__ import annotations

from absl import app

from bench.beside_torch import Work, compare
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap


def main(argv: list[str]) -> None:
    compare("MoE layer forward and backward", "layer", _layer)


def _layer(params: Params, num_partitions: int) -> Work:
    import jax
    import numpy as np

    from bench import synthetic
    from lingvo_gshard.sharding.layout import TensorSpec
    from lingvo_gshard.spmd import lowering
    from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
    from lingvo_gshard.spmd.executable import compile_program

    model, state = synthetic.model_and_state(params, num_partitions)
    layer, theta = (tree.encoder.layers[1].feed_forward for tree in (model.task, state.theta))
    rows, length = params.input.batch_size, params.input.source_len
    shape = (rows, length, params.task.dim)
    x, d_y = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    batch = NestedMap(x=x, d_y=d_y, valid=np.ones((rows, length), np.float32))
    specs = batch.Transform(lambda a: TensorSpec(a.shape, "float32", "BLM"[: a.ndim]))
    seed = NestedMap(seed=np.array([1, 0], np.int32))
    annotated = AnnotatedFn(
        "moe_layer",
        _forward_and_backward(layer),
        ("theta", "batch", "seed"),
        (
            model.state_spec.theta.encoder.layers[1].feed_forward,
            specs,
            NestedMap(seed=TensorSpec((2,), "int32", "_")),
        ),
        {"x": "BLM"} | {f"theta.{path}": s.dims for path, s in layer.weight_specs.FlattenItems()},
    )
    run = compile_program(lowering.export(annotated, model.partitioning))
    args = [
        run.place(name, tree) for name, tree in (("theta", theta), ("batch", batch), ("seed", seed))
    ]
    return Work(
        lambda: jax.block_until_ready(run(*args).Flatten()),
        state.theta,
        synthetic.training_batch(params),
        _gflop(layer, rows * length),
        rows * length,
    )


def _forward_and_backward(layer):
    """(theta, batch, seed) -> the gradients of both outputs to the weights and x."""
    import tensorflow as tf

    from lingvo_gshard.layers.context import Context, Mode

    def fn(theta: NestedMap, batch: NestedMap, seed: NestedMap) -> NestedMap:
        leaves = [batch.x, *theta.Flatten()]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            context = Context(Mode.TRAIN, seed.seed)
            y, routing = layer.FProp(theta, batch.x, batch.valid, context)
        outputs, d_outputs = [y, routing.aux_loss], [batch.d_y, tf.constant(1.0)]
        d_x, *d_theta = tape.gradient(outputs, leaves, d_outputs)
        return NestedMap(x=d_x, theta=theta.Pack(d_theta))

    return fn


def _gflop(layer, tokens: int) -> float:
    """The products with the gate and with two experts a token; backward is twice forward."""
    weights = layer.weight_specs
    of_experts = 2 * (weights.wi.size + weights.wo.size) / layer.p.num_experts
    return 3 * 2 * tokens * (weights.wg.size + of_experts) / 1e9


if __name__ == "__main__":
    app.run(main)
