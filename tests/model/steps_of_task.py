"""A training step and steps of decoding of a task, as the tests of whole models need them.

B batch, k beam, L target length.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.model.translation import TranslationTask
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from tests.layers import building
from tests.model import small_task


def trained(params: InstantiableParams, partitioning: Partitioning, theta: NestedMap) -> NestedMap:
    """Metrics and gradients of one batch in TRAIN mode, on the devices of a partitioning."""
    task = params.Instantiate(Annotator(partitioning))

    def fn(theta, batch, seed):
        leaves = theta.Flatten()
        context = Context(Mode.TRAIN, seed.seed)
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            loss, metrics = task.Loss(theta, batch.features, batch.labels, context)
        return NestedMap(metrics=metrics, d_theta=theta.Pack(tape.gradient(loss, leaves)))

    # Compiled with the gradients split like their weights.
    specs = building.theta_specs(task)
    executable = building.compile_fn(
        fn,
        partitioning,
        building.dims_of(d_theta=specs),
        theta=specs,
        batch=small_task.batch_specs(),
        seed=NestedMap(seed=TensorSpec((2,), "int32", "_")),
    )
    seed = NestedMap(seed=np.array([1, 5], np.int32))
    return executable(theta, small_task.random_batch(3), seed)


def decoded(
    task: TranslationTask, theta: NestedMap, source: NestedMap, targets: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields the logits [B, k, V] of each step of decoding `targets` [B, k, L].

    Each of the k hypotheses, interleaved in one flat sequence, attends only to its own past.
    """
    batch, k, length = targets.shape

    @tf.function(jit_compile=True, autograph=False)
    def step(leaves, ids, mask, index):
        logits, new = task.DecodeStep(theta, state.Pack(leaves), ids, mask, index)
        return logits, new.Flatten()

    state = task.InitDecode(theta, source.Transform(tf.constant), k * length)
    leaves = state.Flatten()
    mask = np.zeros((batch, k, k * length), np.float32)
    for t in range(length):
        for i in range(k):
            mask[:, i, t * k + i] = 1
        ids = tf.constant(targets[:, :, t])
        logits, leaves = step(leaves, ids, tf.constant(mask), tf.constant(t))
        yield logits.numpy()
