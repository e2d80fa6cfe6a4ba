"""Times an MoE layer forward and backward beside PyTorch and NumPy's matrix-product rate.

    python -m bench.moe_layer [--model=toy.MoE8E8L] [--partitions=1,2,4] [--group_sizes=64,256]
    python -m bench.moe_layer --platform=cuda --torch_python=python3 --partitions=1
    python -m bench.moe_layer --shapes=qwen3 [--tokens=1024] [--experts=64] [--clock=cpu]

The layer is the encoder's first layer with experts. bench.step checks that both sides compute the
same function. With --shapes it is a layer by itself, whose time others publish; see
published_shapes.py and beside_published.py.
"""

import math

import jax
import numpy as np
from absl import flags

from bench import beside_published, beside_torch, call_cost, published_shapes, synthetic
from lingvo_gshard import cli
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.numerics import Numerics
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering, tracer
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.program import Program

_SHAPES = flags.DEFINE_enum(
    "shapes", None, list(published_shapes.SHAPES), "The published shape, in place of a model."
)
_TOKENS = flags.DEFINE_integer("tokens", None, "With --shapes: fewer tokens than the shape has.")
_EXPERTS = flags.DEFINE_integer(
    "experts", None, "With --shapes: so many of its experts, with their share of the tokens."
)
_CLOCK = flags.DEFINE_enum(
    "clock",
    "wall",
    list(call_cost.CLOCKS),
    "With --shapes: the clock; cpu, the process' seconds on all cores, suits a busy machine.",
)

_OF_SHAPES = ("tokens", "experts", "clock")
_OF_MODELS = (
    "model",
    "partitions",
    "group_sizes",
    "set",
    "bfloat16_activations",
    "torch_compile",
)


def main() -> None:
    if _SHAPES.value is None:
        _refuse(_OF_SHAPES, "--shapes is missing")
        beside_torch.compare("MoE layer forward and backward", "layer", _layer)
        return

    _refuse(_OF_MODELS, "not possible with --shapes")
    shape = published_shapes.SHAPES[_SHAPES.value]
    layer = published_shapes.part(shape, _TOKENS.value, _EXPERTS.value)
    beside_published.compare(shape, layer, _how())


def _refuse(names: tuple[str, ...], reason: str) -> None:
    """Raises ValueError if one of the flags is given."""
    for name in names:
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name}: {reason}.")


def _how() -> beside_published.How:
    names = ["gather"]
    if flags.FLAGS["dispatches"].present:
        names = flags.FLAGS.dispatches
    return beside_published.How(
        dispatches=tuple(map(Dispatch, names)),
        clock=_CLOCK.value,
        calls=flags.FLAGS.calls,
        torch_python=flags.FLAGS.torch_python,
    )


def _layer(params: Params, num_partitions: int) -> beside_torch.Work:
    model, state = synthetic.model_and_state(params, num_partitions)
    layer = model.task.encoder.layers[1].feed_forward
    theta = state.theta.encoder.layers[1].feed_forward

    # The layer's input, and the gradient of its output.
    rows = params.input.batch_size
    length = params.input.source_len
    shape = (rows, length, params.task.dim)
    x, d_y = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    batch = NestedMap(x=x, d_y=d_y, valid=np.ones((rows, length), np.float32))
    batch_spec = batch.Transform(lambda a: TensorSpec(a.shape, "float32", "BLM"[: a.ndim]))
    run = compile_program(tracer.traced(_program, params, model.partitioning, batch_spec))

    seed = NestedMap(seed=np.array([1, 0], np.int32))
    args = [
        run.place(name, tree) for name, tree in (("theta", theta), ("batch", batch), ("seed", seed))
    ]
    return beside_torch.Work(
        lambda: jax.block_until_ready(run(*args).Flatten()),
        state.theta,
        synthetic.training_batch(params),
        _gflop(layer, rows * length),
        rows * length,
    )


def _program(params: Params, partitioning: Partitioning, batch_spec: NestedMap) -> Program:
    """Traces the layer forward and backward; the gradients are results, so XLA must compute all."""
    model = TaskModel(params, partitioning)
    layer = model.task.encoder.layers[1].feed_forward
    theta_spec = model.state_spec.theta.encoder.layers[1].feed_forward
    annotated = AnnotatedFn(
        "moe_layer",
        _forward_and_backward(layer, Numerics(params.task.product_dtype)),
        ("theta", "batch", "seed"),
        (theta_spec, batch_spec, NestedMap(seed=TensorSpec((2,), "int32", "_"))),
        {"x": "BLM"} | {f"theta.{path}": s.dims for path, s in layer.weight_specs.FlattenItems()},
    )
    return lowering.export(annotated, partitioning)


def _forward_and_backward(layer: MoELayer, numerics: Numerics):
    """Returns a function (theta, batch, seed) -> both outputs' gradients for x and the weights."""

    def fn(theta: NestedMap, batch: NestedMap, seed: NestedMap) -> NestedMap:
        leaves = [batch.x, *theta.Flatten()]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            context = Context(Mode.TRAIN, seed.seed, numerics=numerics)
            y, routing = layer.FProp(theta, batch.x, batch.valid, context)
        outputs = [y, routing.aux_loss]
        d_outputs = [batch.d_y, tf.constant(1.0)]
        d_x, *d_theta = tape.gradient(outputs, leaves, d_outputs)
        return NestedMap(x=d_x, theta=theta.Pack(d_theta))

    return fn


def _gflop(layer: MoELayer, tokens: int) -> float:
    """Counts the products with the gate and a token's two experts; backward counts twice."""
    weights = layer.weight_specs
    gate, *experts = (math.prod(w.shape) for w in (weights.wg, weights.wi, weights.wo))
    return 3 * 2 * tokens * (gate + 2 * sum(experts) / layer.p.num_experts) / 1e9


if __name__ == "__main__":
    cli.run("moe_layer", main)
