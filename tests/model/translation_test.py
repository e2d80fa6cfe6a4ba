"""The whole model: partitioning, packing, the loss, weights and decoding.

B batch, T source length, L target length, V target vocabulary, k beam.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.layers.context import Context, Mode
from tests import exhaustive
from tests.layers import building
from tests.model import small_task, steps_of_task
from tests.model.small_task import B, D, E, H, M, N
from tests.spmd import functions


def _task():
    return small_task.task_params().Instantiate(building.Unannotated())


@pytest.fixture(scope="module")
def theta():
    return building.random_theta(_task())


@pytest.fixture(scope="module")
def trained(theta):
    """Number of partitions -> metrics and gradients in TRAIN mode, computed once.

    None is one device without compilation.
    """

    @functools.cache
    def computed(n):
        parts = functions.partitioning(n) if n else None
        return steps_of_task.trained(small_task.task_params(), parts, theta)

    return computed


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_partitions",
    [4, pytest.param(2, marks=exhaustive.RARE), 8],
)
def test_partitioned_training_equals_unpartitioned(trained, num_partitions):
    got = trained(num_partitions)
    want = trained(None)
    np.testing.assert_allclose(got.metrics.loss, want.metrics.loss, rtol=1e-5)
    building.assert_close(got, want, rtol=1e-3)


def test_every_weight_has_a_gradient(trained):
    for path, gradient in trained(None).d_theta.FlattenItems():
        assert np.abs(gradient).max() > 1e-7, path


def test_metrics_and_their_sum_in_the_loss(trained):
    m = trained(None).metrics
    assert set(m.routing.overflow) == set(m.routing.load_E) == {"encoder_1", "decoder_1"}
    layers = {"encoder_0", "encoder_1", "decoder_0", "decoder_1"}
    assert set(m.activation_norms) == layers

    weights = small_task.random_batch(3).labels.target_weights
    assert m.num_tokens == weights.sum()
    features = small_task.random_batch(3).features
    for side in ("source", "target"):
        share = (features[f"{side}_segment_ids"] == 0).mean()
        np.testing.assert_allclose(m.padding[side], share, rtol=1e-6)

    assert 0.5 * np.log(small_task.TARGET_VOCAB) < m.nll < 3 * np.log(small_task.TARGET_VOCAB)
    smoothing = (m.loss - 0.64 * m.aux_loss - 0.9 * m.nll) / 0.1
    assert smoothing > np.log(small_task.TARGET_VOCAB)  # The uniform part is at least log V.


def _logits(theta, batch, mode=Mode.EVAL):
    return _task().FProp(theta, batch.features.Transform(tf.constant), Context(mode))[0].numpy()


def _first_rows(*rows):
    """A batch of these rows; each other row holds one pair, to fill the groups evenly."""
    return small_task.batch_of([*rows, *[([[9]], [[8]])] * (B - len(rows))])


def test_two_packed_pairs_equal_two_rows(theta):
    source = [[5, 6], [7, 8]]
    target = [[9, 10], [11, 12, 13]]
    packed = _logits(theta, _first_rows((source, target)))
    apart = _logits(theta, _first_rows((source[:1], target[:1]), (source[1:], target[1:])))
    np.testing.assert_allclose(packed[0, :3], apart[0, :3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[0, 3:7], apart[1, :4], rtol=1e-4, atol=1e-5)


def test_nll_equals_formula(theta):
    batch = small_task.random_batch(4)
    _, metrics = _task().Loss(
        theta,
        batch.features.Transform(tf.constant),
        batch.labels.Transform(tf.constant),
        Context(Mode.EVAL),
    )

    logits = _logits(theta, batch).astype("float64")
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = batch.labels.target_labels
    weights = batch.labels.target_weights
    nll = -np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(metrics.nll, (nll * weights).sum() / weights.sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder_experts", "decoder_experts", "layers_as"), [(8, 16, "UNROLLED"), (3, 1, "LOOP")]
)
def test_k_follows_the_experts_of_each_stack(encoder_experts, decoder_experts, layers_as):
    """L = l_nll + sum over layers of 0.01 * E^2 * l_aux, for any settings of E."""
    params = small_task.Experiment.params()
    settings = [
        "task.label_smoothing=0.0",
        f"task.encoder.moe.num_experts={encoder_experts}",
        f"task.decoder.moe.num_experts={decoder_experts}",
    ]
    for stack in ("encoder", "decoder"):
        settings += [f"task.{stack}.layers_as={layers_as}", f"task.{stack}.moe.group_size=2"]
    for setting in settings:
        hyperparams.apply_setting(params, setting)
    task = params.task.Instantiate(building.Unannotated())

    batch = small_task.random_batch(4).Transform(tf.constant)
    theta = building.random_theta(task)
    loss, metrics = task.Loss(theta, batch.features, batch.labels, Context(Mode.EVAL))

    l_aux = metrics.routing.aux_loss
    assert set(l_aux) == {"encoder_1", "decoder_1"}
    encoder_part = 0.01 * encoder_experts**2 * float(l_aux.encoder_1)
    decoder_part = 0.01 * decoder_experts**2 * float(l_aux.decoder_1)
    assert float(loss - metrics.nll) == pytest.approx(encoder_part + decoder_part, rel=1e-4)
    # The metric is unweighted.
    assert float(metrics.aux_loss) == pytest.approx(sum(map(float, l_aux.values())))


def test_batch_of_padding_has_zero_loss(theta):
    batch = small_task.random_batch(4).Transform(lambda x: tf.zeros_like(tf.constant(x)))
    loss, metrics = _task().Loss(theta, batch.features, batch.labels, Context(Mode.EVAL))
    assert metrics.num_tokens == 0 and loss == 0


def test_num_weights_equals_count_by_hand():
    attention = 4 * M * N * D
    norm = 2 * M
    dense = 2 * M * H
    experts = M * E + 2 * E * M * H
    encoder = 2 * (attention + 2 * norm) + dense + experts + norm
    decoder = 2 * (2 * attention + 3 * norm) + dense + experts + norm
    tables = (small_task.SOURCE_VOCAB + 2 * small_task.TARGET_VOCAB) * M
    assert _task().num_weights == encoder + decoder + tables


@pytest.mark.slow
def test_decoding_step_by_step_equals_teacher_forcing(theta):
    steps_of_task.check_decoding(_task(), theta)
