"""An MoE layer as functions to export: its forward pass, and its gradients."""

import dataclasses

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from xla_spmd.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The layer on each device: M, H, the tokens of its one group, and its experts."""

    model_dim: int
    hidden_dim: int
    tokens: int
    experts: int


def partitioning(num_partitions: int) -> Partitioning:
    """Returns the paper's table over one axis."""
    return Partitioning.from_dict(Mesh.flat(num_partitions), {"B": "d", "G": "d", "E": "d"})


def forward(num_partitions: int, sizes: Sizes) -> AnnotatedFn:
    """Returns the layer's training pass alone."""
    layer = _layer(num_partitions, sizes)

    def fn(theta: NestedMap, batch: NestedMap) -> NestedMap:
        y_BLM, _ = layer.FProp(theta, batch.x_BLM, batch.valid_BL, Context(Mode.TRAIN, batch.seed))
        return NestedMap(y_BLM=y_BLM)

    args = (_theta(layer), _batch(num_partitions, sizes))
    return AnnotatedFn("moe", fn, ("theta", "batch"), args, {"y_BLM": "BLM"})


def forward_and_backward(num_partitions: int, sizes: Sizes) -> AnnotatedFn:
    """Returns the gradients of the layer's weights and inputs, given d_y_BLM in the batch."""
    layer = _layer(num_partitions, sizes)

    def fn(theta: NestedMap, batch: NestedMap) -> NestedMap:
        leaves = [*theta.Flatten(), batch.x_BLM]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            context = Context(Mode.TRAIN, batch.seed)
            y_BLM, routing = layer.FProp(theta, batch.x_BLM, batch.valid_BL, context)
            loss = tf.reduce_sum(y_BLM * batch.d_y_BLM) + routing.aux_loss
        *d_theta, d_x_BLM = tape.gradient(loss, leaves)
        return NestedMap(d_theta=theta.Pack(d_theta), d_x_BLM=d_x_BLM)

    theta, batch = _theta(layer), _batch(num_partitions, sizes)
    batch.d_y_BLM = batch.x_BLM
    dims = {f"d_theta.{path}": spec.dims for path, spec in theta.FlattenItems()}
    dims["d_x_BLM"] = "BLM"
    return AnnotatedFn("moe", fn, ("theta", "batch"), (theta, batch), dims)


def _layer(num_partitions: int, sizes: Sizes) -> MoELayer:
    params = MoELayer.Params().Set(
        dim=sizes.model_dim,
        hidden_dim=sizes.hidden_dim,
        num_experts=sizes.experts * num_partitions,
        group_size=sizes.tokens,
    )
    return params.Instantiate(Annotator(partitioning(num_partitions)), "moe")


def _theta(layer: MoELayer) -> NestedMap:
    return layer.weight_specs.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims))


def _batch(num_partitions: int, sizes: Sizes) -> NestedMap:
    x_BLM = (num_partitions, sizes.tokens, sizes.model_dim)
    return NestedMap(
        x_BLM=TensorSpec(x_BLM, "float32", "BLM"),
        valid_BL=TensorSpec(x_BLM[:2], "float32", "BL"),
        seed=TensorSpec((2,), "int32", "_"),
    )
