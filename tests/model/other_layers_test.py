"""The whole model with other norms, positions, activations and biases: partitioned, and decoding.

That each of them is right is tested in layers/other_models_test.py.

B batch, L target length, k beam.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.norms import RMSNorm
from lingvo_gshard.layers.positions import RelativeBias, RotaryPositions
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from tests.layers import building
from tests.model import small_task, steps_of_task
from tests.model.small_task import B, L

_POSITIONS = {
    "rotary": RotaryPositions.Params(),
    "relative": RelativeBias.Params().Set(num_buckets=4, max_distance=5),
}


def _params(positions, dropout=0.0, **stack_settings):
    p = small_task.task_params(dropout)
    for stack in (p.encoder, p.decoder):
        stack.Set(**stack_settings)
        stack.layer.norm = RMSNorm.Params()
        stack.layer.attention.Set(
            num_heads=4, head_dim=4, biases=True, positions=_POSITIONS[positions].Copy()
        )
        stack.dense.Set(hidden_dim=16, activation=Activation.GELU_TANH, gated=True, biases=True)
        stack.moe.Set(hidden_dim=16, activation=Activation.SILU, gated=True)
    return p


@functools.cache
def _trained(positions, num_partitions, letters):
    """Metrics and gradients in TRAIN mode, of a loop of layers that recomputes its blocks."""
    params = _params(positions, dropout=0.2, layers_as=Layers.LOOP, remat=Remat.BLOCK)
    table = Partitioning.from_dict(Mesh.flat(num_partitions), dict.fromkeys(letters, "d"))
    theta = building.random_theta(params.Instantiate(building.Unannotated()))
    return steps_of_task.trained(params, table, theta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "letters"),
    [
        pytest.param(2, "BGE", marks=pytest.mark.exhaustive),
        pytest.param(4, "HN", marks=pytest.mark.exhaustive),
        (8, "BGE"),
    ],
)
@pytest.mark.parametrize("positions", _POSITIONS)
def test_partitioned_training_equals_unpartitioned(positions, num_partitions, letters):
    got = _trained(positions, num_partitions, letters)
    building.assert_close(got, _trained(positions, 1, ""), rtol=1e-3)


@pytest.mark.parametrize("positions", _POSITIONS)
def test_decoding_step_by_step_equals_teacher_forcing(positions):
    """Each of two hypotheses, interleaved in one flat sequence, attends only to its own past."""
    k = 2
    task = _params(positions).Instantiate(building.Unannotated())
    theta = building.random_theta(task).Transform(tf.constant)
    source = small_task.source_batch(5).Transform(tf.constant)
    targets = np.random.default_rng(2).integers(4, small_task.TARGET_VOCAB, (B, k, L))
    targets = targets.astype("int32")

    want = []
    for i in range(k):
        features = NestedMap(
            source,
            target_ids=tf.constant(targets[:, i]),
            target_segment_ids=tf.ones((B, L), tf.int32),
            target_positions=tf.tile(tf.range(L)[None], [B, 1]),
        )
        logits, _ = task.FProp(theta, features, Context(Mode.EVAL))
        want.append(logits.numpy())

    for t, logits in enumerate(steps_of_task.decoded(task, theta, source, targets)):
        for i in range(k):
            np.testing.assert_allclose(logits[:, i], want[i][:, t], rtol=1e-4, atol=1e-4)
