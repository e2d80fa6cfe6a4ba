"""Linear regression as a model_fn: a user's own model, without any of the library's layers.

B rows, H inputs, V outputs.
"""

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd.specs import WHOLE
from lingvo_gshard.train.config import train_params
from lingvo_gshard.train.estimator import TPUEstimator
from xla_spmd.mesh import Mesh

B, H, V = 12, 8, 3


def f32(shape, dims):
    """A float32 spec."""
    return TensorSpec(shape, "float32", dims)


STATE = NestedMap(
    step=TensorSpec((), "int32", ""),
    theta=NestedMap(bias_V=f32((V,), "V"), w_HV=f32((H, V), "HV")),
    momentum=NestedMap(bias_V=f32((V,), "V"), w_HV=f32((H, V), "HV")),
)


def model_params():
    """The learning rate, and settings that are not the model's."""
    p = Params()
    p.Define("task", Params(), "")
    p.task.Define("learning_rate", 0.05, "")
    p.Define("max_steps", 10, "")
    p.Define("train", train_params().Set(seed=0), "")
    return p


def init_fn(seed):
    """Random weights, zero momentum."""
    w_HV = tf.random.stateless_uniform([H, V], seed, -1.0, 1.0, alg="threefry")
    zeros = NestedMap(bias_V=tf.zeros([V]), w_HV=tf.zeros([H, V]))
    theta = NestedMap(bias_V=tf.zeros([V]), w_HV=w_HV)
    return NestedMap(step=tf.constant(0), theta=theta, momentum=zeros)


def model_fn(state, features, labels, mode, params):
    """Squared error, SGD with momentum."""
    theta = state.theta

    def predicted():
        return features.x_BH @ theta.w_HV + theta.bias_V

    if mode == Mode.PREDICT:
        return TPUEstimatorSpec(
            mode, predictions=NestedMap(y_BV=predicted(), total_B=tf.reduce_sum(predicted(), 1))
        )
    if mode == Mode.EVAL:
        squares_B = tf.reduce_sum(tf.square(predicted() - labels.y_BV), 1)
        total, weight = tf.reduce_sum(squares_B * labels.weight_B), tf.reduce_sum(labels.weight_B)
        return TPUEstimatorSpec(mode, eval_metrics={"error": (total, weight)})
    with tf.GradientTape() as tape:
        tape.watch(theta.Flatten())
        loss = tf.reduce_mean(tf.square(predicted() - labels.y_BV))
    gradients = tape.gradient(loss, theta.Flatten())
    momentum = [0.9 * m + g for m, g in zip(state.momentum.Flatten(), gradients, strict=True)]
    weights = zip(theta.Flatten(), momentum, strict=True)
    new = NestedMap(
        step=state.step + 1,
        theta=theta.Pack(w - params.task.learning_rate * m for w, m in weights),
        momentum=theta.Pack(momentum),
    )
    metrics = NestedMap(num_tokens=tf.constant(5.0), mean_V=tf.reduce_mean(predicted(), 0))
    return TPUEstimatorSpec(mode, loss=loss, train_op=new, metrics=metrics)


def batch_specs(num_rows=B):
    """The specs of a batch."""
    return NestedMap(
        features=NestedMap(x_BH=f32((num_rows, H), "B_")),
        labels=NestedMap(y_BV=f32((num_rows, V), "B_"), weight_B=f32((num_rows,), "B")),
    )


class Batches:
    """Batch i is a function of i; `poisoned_batch` has a NaN. Yields its share of the rows."""

    def __init__(self, num_batches=None, poisoned_batch=None, share=WHOLE, num_rows=B):
        self._index, self._num_batches, self._poisoned = 0, num_batches, poisoned_batch
        self.specs = batch_specs(num_rows)
        size = num_rows // share.count
        self._rows = slice(share.index * size, (share.index + 1) * size)
        self.closed = False

    def __iter__(self):
        return self

    def __next__(self):
        if self._index == self._num_batches:
            raise StopIteration
        self._index += 1
        return self.batch(self._index - 1).Transform(lambda array: array[self._rows])

    def batch(self, index):
        """A noisy linear function's inputs and outputs."""
        rng = np.random.default_rng(index)
        x_BH = rng.standard_normal((B, H)).astype("float32")
        true_HV = np.linspace(-1, 1, H * V, dtype="float32").reshape(H, V)
        y_BV = x_BH @ true_HV + 0.5
        if index == self._poisoned:
            y_BV[0, 0] = np.nan
        weight_B = rng.integers(0, 3, B).astype("float32")
        labels = NestedMap(y_BV=y_BV.astype("float32"), weight_B=weight_B)
        return NestedMap(features=NestedMap(x_BH=x_BH), labels=labels)

    def get_state(self):
        """The next batch's index."""
        return {"index": self._index}

    def set_state(self, state):
        """Continues with state['index']."""
        self._index = state["index"]

    def close(self):
        """Records that it was called."""
        self.closed = True


_ARGUMENTS = [
    "params",
    "model_fn",
    "init_fn",
    "state_spec",
    "model_prefixes",
    "warm_start",
    "partitioning",
    "executables",
    "log_step_count_steps",
]


def uneven(num_partitions):
    """The partitioning that splits V = 3."""
    return Partitioning.from_dict(Mesh.flat(num_partitions), {"B": "d", "V": "d"})


def make(model_dir, num_partitions=2, steps_per_call=1, **options):
    """A TPUEstimator of the regression; `options` are its arguments, or settings of train."""
    given = {key: options.pop(key) for key in _ARGUMENTS if key in options}
    params = given.pop("params", None) or model_params()
    params.train.Set(iterations_per_loop=steps_per_call, **options)
    table = {"B": "d", "H": "d"}
    arguments = {
        "model_fn": model_fn,
        "params": params,
        "partitioning": Partitioning.from_dict(Mesh.flat(num_partitions), table),
        "state_spec": STATE,
        "init_fn": init_fn,
        "show_progress": False,
        **given,
    }
    return TPUEstimator(model_dir=str(model_dir), **arguments)
