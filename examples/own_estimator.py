"""A classifier of points, trained by TPUEstimator on four virtual devices, in two parts.

PYTHONPATH=. python examples/own_estimator.py
"""

import tempfile

import numpy as np

import lingvo_gshard as gshard

gshard.prepare(num_devices=4)  # Four virtual devices on any CPU.

import tensorflow as tf  # noqa: E402

from lingvo_gshard import Mesh, NestedMap, Partitioning, TensorSpec, TPUEstimator  # noqa: E402
from lingvo_gshard.core.hyperparams import Params  # noqa: E402
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec  # noqa: E402
from lingvo_gshard.train.config import train_params  # noqa: E402

B, M, H = 32, 2, 16  # Rows, inputs, hidden units.


# The state is a tree of tensors with a letter for each dim. It must have a `step`.
STATE = NestedMap(
    step=TensorSpec((), "int32", ""),
    theta=NestedMap(
        w_MH=TensorSpec((M, H), "float32", "MH"),
        w_H=TensorSpec((H,), "float32", "H"),
        bias=TensorSpec((), "float32", ""),
    ),
)


def init_fn(seed):
    uniform = tf.random.stateless_uniform
    w_MH = uniform([M, H], seed, -1.0, 1.0, alg="threefry")
    theta = NestedMap(w_MH=w_MH, w_H=tf.zeros([H]), bias=tf.zeros([]))
    return NestedMap(step=tf.constant(0), theta=theta)


def model_fn(state, features, labels, mode, params):
    def logits_B(theta):
        hidden_BH = tf.square(features.x_BM @ theta.w_MH)
        return tf.einsum("BH,H->B", hidden_BH, theta.w_H) + theta.bias

    if mode is Mode.PREDICT:
        return TPUEstimatorSpec(mode, predictions=NestedMap(p_B=tf.sigmoid(logits_B(state.theta))))
    if mode is Mode.EVAL:
        right_B = tf.cast((logits_B(state.theta) > 0) == (labels.y_B > 0.5), tf.float32)
        return TPUEstimatorSpec(
            mode, eval_metrics={"accuracy": (tf.reduce_sum(right_B), tf.constant(float(B)))}
        )
    with tf.GradientTape() as tape:
        tape.watch(state.theta.Flatten())
        loss = tf.reduce_mean(
            tf.nn.sigmoid_cross_entropy_with_logits(labels.y_B, logits_B(state.theta))
        )
    gradients = tape.gradient(loss, state.theta.Flatten())
    pairs = zip(state.theta.Flatten(), gradients, strict=True)
    theta = state.theta.Pack(w - params.learning_rate * g for w, g in pairs)
    return TPUEstimatorSpec(mode, loss=loss, train_op=NestedMap(step=state.step + 1, theta=theta))


# An input yields batches, and saves and restores its position.
class Circles:
    """Points within a circle, or not."""

    specs = NestedMap(
        features=NestedMap(x_BM=TensorSpec((B, M), "float32", "BM")),
        labels=NestedMap(y_B=TensorSpec((B,), "float32", "B")),
    )

    def __init__(self, num_batches):
        self._index, self._num_batches = 0, num_batches

    def __iter__(self):
        while self._index < self._num_batches:
            x_BM = np.random.default_rng(self._index).uniform(-1, 1, (B, M)).astype(np.float32)
            self._index += 1
            y_B = (np.sum(x_BM**2, axis=1) < 0.6).astype(np.float32)
            yield NestedMap(features=NestedMap(x_BM=x_BM), labels=NestedMap(y_B=y_B))

    def get_state(self):
        return {"index": self._index}

    def set_state(self, state):
        self._index = state["index"]


params = Params()
params.Define("learning_rate", 0.5, "The step size of gradient descent.")
params.Define("train", train_params().Set(iterations_per_loop=50), "How to train.")
# The rows are split over four devices. {"B": "d", "H": "d"} would also split the hidden units.
partitioning = Partitioning.from_dict(Mesh.flat(4), {"B": "d"})
estimator = TPUEstimator(
    model_fn,
    tempfile.mkdtemp(),
    params=params,
    partitioning=partitioning,
    state_spec=STATE,
    init_fn=init_fn,
)
estimator.train(lambda p: Circles(10**6), max_steps=200)
estimator.train(lambda p: Circles(10**6), max_steps=500)  # Continues from step 200.
metrics = estimator.evaluate(lambda p: Circles(20))
print(f"step {metrics['step']}, accuracy {metrics['accuracy']:.3f}")
