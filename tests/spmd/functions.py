"""Small annotated functions for several tests of partitioning."""

import numpy as np
import tensorflow as tf
from jax import export as jax_export

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.program import Program
from xla_spmd.mesh import Mesh
from xla_spmd.runtime import jax_private


def partitioning(num_partitions: int) -> Partitioning:
    """The paper's table: B, G and E over one axis."""
    return Partitioning.from_dict(Mesh.flat(num_partitions), {"B": "d", "G": "d", "E": "d"})


def f32(shape: tuple[int, ...], dims: str) -> TensorSpec:
    """A float32 spec."""
    return TensorSpec(shape, "float32", dims)


def randoms(tree: NestedMap, seed: int) -> NestedMap:
    """Returns standard normal arrays for a tree of float32 specs."""
    rng = np.random.default_rng(seed)
    return tree.Transform(lambda spec: rng.standard_normal(spec.shape).astype(spec.dtype))


def stablehlo(program: Program) -> str:
    """Returns the text of a program."""
    exported = jax_export.deserialize(bytearray(program.exported))
    return str(jax_private.stablehlo_module(exported.mlir_module_serialized))


def sgd_step() -> AnnotatedFn:
    """Returns one step of a two-layer perceptron, which donates its weights."""

    def fn(weights: NestedMap, batch: NestedMap) -> NestedMap:
        leaves = weights.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            hidden_BH = tf.nn.relu(batch.x_BM @ weights.wi_MH)
            out_BV = hidden_BH @ weights.wo_HV
            loss = tf.reduce_mean(tf.square(out_BV - batch.y_BV))
        grads = tape.gradient(loss, leaves)
        new = [leaf - 0.1 * grad for leaf, grad in zip(leaves, grads, strict=True)]
        return NestedMap(weights=weights.Pack(new), loss=loss, hidden_BH=hidden_BH)

    weights = NestedMap(wi_MH=f32((5, 6), "MH"), wo_HV=f32((6, 3), "HV"))
    batch = NestedMap(x_BM=f32((16, 5), "BM"), y_BV=f32((16, 3), "BV"))
    return AnnotatedFn(
        "sgd", fn, ("weights", "batch"), (weights, batch), {"hidden_BH": "BH"}, ("weights",)
    )


def moe_dispatch(parts: Partitioning) -> AnnotatedFn:
    """Returns dispatch, experts and combine: the einsums of the paper's Algorithm 2."""
    annotate = Annotator(parts).annotate

    def fn(weights: NestedMap, batch: NestedMap) -> NestedMap:
        sent = tf.einsum("gsec,gsm->egcm", batch.mask_GSEC, batch.x_GSM)
        sent = annotate(sent, "EGCM")
        hidden = tf.nn.relu(tf.einsum("egcm,emh->egch", sent, weights.wi_EMH))
        back = annotate(tf.einsum("egch,ehm->gecm", hidden, weights.wo_EHM), "GECM")
        return NestedMap(y_GSM=tf.einsum("gsec,gecm->gsm", batch.mask_GSEC, back))

    weights = NestedMap(wi_EMH=f32((8, 5, 6), "EMH"), wo_EHM=f32((8, 6, 5), "EHM"))
    batch = NestedMap(mask_GSEC=f32((16, 7, 8, 3), "GSEC"), x_GSM=f32((16, 7, 5), "GSM"))
    return AnnotatedFn("moe", fn, ("weights", "batch"), (weights, batch), {"y_GSM": "GSM"})


def numpy_sgd(weights: NestedMap, batch: NestedMap) -> NestedMap:
    """Returns the perceptron's step by hand: backpropagation written out."""
    pre = batch.x_BM @ weights.wi_MH
    hidden = np.maximum(pre, 0)
    error = hidden @ weights.wo_HV - batch.y_BV
    d_out = 2 * error / error.size
    d_hidden = (d_out @ weights.wo_HV.T) * (pre > 0)
    return NestedMap(
        weights=NestedMap(
            wi_MH=weights.wi_MH - 0.1 * batch.x_BM.T @ d_hidden,
            wo_HV=weights.wo_HV - 0.1 * hidden.T @ d_out,
        ),
        loss=np.mean(error**2),
        hidden_BH=hidden,
    )


def close(got: NestedMap, want: NestedMap) -> None:
    for (path, a), (expected, b) in zip(got.FlattenItems(), want.FlattenItems(), strict=True):
        assert path == expected
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=path)
