"""Classes of images, by a convolutional network.

B images, X rows, Y columns, C channels, K classes.
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.base_layer import gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.model import metrics as metric
from lingvo_gshard.model.spec import MetricSums
from lingvo_gshard.model.task import Task
from lingvo_gshard.sharding.windows import convolution, max_pool


class ImageTask(Task):
    """Two convolutions, each with a pooling, and the largest values of each filter."""

    UNIT = "image"
    SHOWN = ("accuracy",)

    class Params(Task.Params):
        image_size: int = setting(REQUIRED, "X and Y, in pixels.")
        filters: tuple[int, int] = setting((16, 32), "The filters of the two convolutions.")
        num_classes: int = setting(REQUIRED, "K.")

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        first, second = self.p.filters
        classes = self.p.num_classes
        # A kernel is whole on every device, so its dims have no letters.
        self.CreateVariable("first", gaussian((5, 5, 1, first), "____", fan_in=25))
        self.CreateVariable("second", gaussian((5, 5, first, second), "____", fan_in=25 * first))
        self.CreateVariable("softmax", gaussian((second, classes), "__", fan_in=second))

    def FProp(self, theta: NestedMap, pixels: tf.Tensor) -> tf.Tensor:
        """Computes the logits of images, float32 [B, K], of their pixels, float32 [B, X, Y, C]."""
        x = self.annotate(pixels, "BXYC")
        x = tf.nn.relu(convolution(x, theta.first, (2, 2), "SAME"))
        x = self.annotate(max_pool(x, (3, 3), (2, 2), "SAME"), "BXYC")
        x = tf.nn.relu(convolution(x, theta.second, (1, 1), "SAME"))
        x = self.annotate(max_pool(x, (3, 3), (2, 2), "SAME"), "BXYC")
        return tf.reduce_max(x, [1, 2]) @ theta.softmax

    def Loss(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the mean nll, in nats an image, and the metrics nll, accuracy and num_tokens.

        `features` are pixels, float32 [B, X, Y, C]; `labels` are classes, int32 [B], and weights,
        float32 [B], 0 where a row has no image.
        """
        logits = self.FProp(theta, features.pixels)
        nll = tf.nn.sparse_softmax_cross_entropy_with_logits(labels.classes, logits)
        best = tf.argmax(logits, 1, output_type=tf.int32)

        total_nll, num_images = metric.mean(nll, labels.weights)
        num_right, _ = metric.accuracy(labels.classes, best, labels.weights)
        per_image = 1.0 / tf.maximum(num_images, 1.0)
        loss = total_nll * per_image
        accuracy = num_right * per_image
        return loss, NestedMap(loss=loss, nll=loss, accuracy=accuracy, num_tokens=num_images)

    def EvalMetrics(self, metrics: NestedMap) -> MetricSums:
        num_images = metrics.num_tokens
        return {name: (metrics[name] * num_images, num_images) for name in ("nll", "accuracy")}
