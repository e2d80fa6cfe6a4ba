"""bfloat16 activations: the dtypes of tensors, and how close loss and gradients stay."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers import products
from lingvo_gshard.layers.context import Context, Mode
from tests.layers import building
from tests.model import small_task


class _Dtypes(building.Unannotated):
    """Records the dtypes of annotated tensors by their dims."""

    def __init__(self):
        self.seen = {}

    def annotate(self, tensor, dims):
        self.seen.setdefault(dims, set()).add(tensor.dtype)
        return super().annotate(tensor, dims)


def _eager_dot():
    """TensorFlow multiplies 16-bit factors in float32 only where XLA compiles."""

    def dot(a, b, *, transpose_b=False, rounded=False):
        wide = [tf.cast(x, tf.float32) for x in (a, b)]
        product = tf.matmul(*wide, transpose_b=transpose_b)
        return tf.cast(tf.cast(product, tf.bfloat16), tf.float32) if rounded else product

    return mock.patch.object(products, "dot", dot)


def _run(activation_dtype):
    """(loss, metrics, gradients by path, dtypes by dims) of a training step."""
    dtypes = _Dtypes()
    params = small_task.task_params().Set(activation_dtype=activation_dtype)
    task = params.Instantiate(dtypes)
    theta = building.random_theta(task).Transform(tf.constant)
    batch = small_task.random_batch(3).Transform(tf.constant)

    with _eager_dot():
        with tf.GradientTape() as tape:
            tape.watch(theta.Flatten())
            context = Context(Mode.TRAIN, tf.constant([1, 5]))
            loss, metrics = task.Loss(theta, batch.features, batch.labels, context)
        gradients = tape.gradient(loss, theta.Flatten())

    return loss, metrics, dict(theta.Pack(gradients).FlattenItems()), dtypes.seen


@pytest.fixture(scope="module")
def wide():
    return _run("float32")


@pytest.fixture(scope="module")
def narrow():
    return _run("bfloat16")


def test_layers_compute_in_bfloat16_but_router_and_loss_in_float32(narrow):
    loss, metrics, _, seen = narrow
    for dims in ("BNLD", "BNTD", "BLND", "BLH", "GSM", "EGCM", "EGH", "GECM"):
        assert seen[dims] == {tf.bfloat16}, dims
    for dims in ("GSE", "GSEC", "ULV"):
        assert seen[dims] == {tf.float32}, dims
    assert {x.dtype for x in [loss, *metrics.Flatten()]} == {tf.float32}


def test_loss_is_close_to_float32(wide, narrow):
    assert wide[0] != narrow[0]
    np.testing.assert_allclose(narrow[0], wide[0], rtol=0.01)


def test_gradients_are_float32_and_have_the_same_direction(wide, narrow):
    for path, gradient in narrow[2].items():
        assert gradient.dtype == tf.float32, path

    def flat(gradients):
        return np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in gradients.values()])

    a = flat(wide[2])
    b = flat(narrow[2])
    assert a @ b > 0.97 * np.linalg.norm(a) * np.linalg.norm(b)


def test_other_dtype_is_refused():
    params = small_task.task_params().Set(activation_dtype="float16")
    with pytest.raises(ValueError, match="must be float32 or bfloat16, got 'float16'"):
        params.Instantiate(building.Unannotated())


def test_logits_are_not_rounded_to_16_bits():
    params = small_task.task_params().Set(activation_dtype="bfloat16")
    task = params.Instantiate(building.Unannotated())
    theta = building.random_theta(task).Transform(tf.constant)
    x = tf.cast(tf.random.stateless_normal([2, 3, params.dim], (1, 2)), tf.bfloat16)

    @tf.function(autograph=False, jit_compile=True)
    def compute():
        return task._logits(theta, x, Context(Mode.EVAL))

    logits = compute()
    rounded = tf.cast(tf.cast(logits, tf.bfloat16), tf.float32)
    assert logits.dtype == tf.float32 and np.mean(logits != rounded) > 0.9
