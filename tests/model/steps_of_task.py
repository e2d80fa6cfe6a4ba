"""Training and decoding of small models, as the tests of whole models need them.

B batch, k beam, L target length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.model.translation import TranslationTask
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.train.programs import Programs
from tests.layers import building
from tests.model import small_task


def trained(
    params: InstantiableParams, partitioning: Partitioning | None, theta: NestedMap
) -> NestedMap:
    """Metrics and gradients of one batch in TRAIN mode, on the devices of a partitioning.

    Without a partitioning they are computed eagerly.
    """
    task = params.Instantiate(Annotator(partitioning) if partitioning else building.Unannotated())

    def fn(theta, batch, seed):
        leaves = theta.Flatten()
        context = Context(Mode.TRAIN, seed.seed)
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            loss, terms = task.Loss(theta, batch.features, batch.labels, context)
            metrics = task.Metrics(terms)
        return NestedMap(metrics=metrics, d_theta=theta.Pack(tape.gradient(loss, leaves)))

    batch = small_task.random_batch(3)
    seed = NestedMap(seed=np.array([1, 5], np.int32))
    if partitioning is None:
        return building.run_eagerly(fn, theta=theta, batch=batch, seed=seed)

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
    return executable(theta, batch, seed)


def training(
    params: InstantiableParams, num_partitions: int, batches: Sequence[NestedMap]
) -> NestedMap:
    """Trains an experiment by a step for each batch, from random weights.

    Returns the metrics of each step and the last state.
    """
    parts = placement.partitioning(params, num_partitions)
    programs = Programs(TaskModel(params, parts), in_process=True)
    specs = batches[0].Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL"))
    step = programs.get(Mode.TRAIN, specs)

    state = small_task.start_state(TaskModel(params, parts))
    metrics = []
    for batch in batches:
        result = step(state, batch.Transform(lambda x: x[None]))
        state = result.state
        metrics.append(result.metrics.Transform(np.asarray))
    return NestedMap(metrics=metrics, state=state.Transform(np.asarray))


def assert_same_training(found: NestedMap, wanted: NestedMap) -> None:
    """Compares the losses, the norms of gradients and the states of two trainings."""
    for ours, theirs in zip(found.metrics, wanted.metrics, strict=True):
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
        building.assert_close(ours.gradient_norms, theirs.gradient_norms, rtol=1e-3)
    building.assert_close(found.state, wanted.state, rtol=1e-3)


def check_decoding(task: TranslationTask, theta: NestedMap) -> None:
    """Asserts that decoding step by step gives the logits of teacher forcing."""
    source = small_task.source_batch(5).Transform(tf.constant)
    size = (small_task.B, 2, small_task.L)
    targets = np.random.default_rng(2).integers(4, small_task.TARGET_VOCAB, size, np.int32)

    weights = theta.Transform(tf.constant)
    wanted = []
    for hypothesis in range(2):
        features = NestedMap(
            source,
            target_ids=tf.constant(targets[:, hypothesis]),
            target_segment_ids=tf.ones(size[::2], tf.int32),
            target_positions=tf.tile(tf.range(small_task.L)[None], [small_task.B, 1]),
        )
        logits, _ = task.FProp(weights, features, Context(Mode.EVAL))
        wanted.append(logits.numpy())

    for t, logits in enumerate(decoded(task, weights, source, targets)):
        for hypothesis in range(2):
            want = wanted[hypothesis][:, t]
            np.testing.assert_allclose(logits[:, hypothesis], want, rtol=1e-4, atol=1e-4)


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
