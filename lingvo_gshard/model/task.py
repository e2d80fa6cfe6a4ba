"""The task that an experiment learns: the interface that all other packages use.

A new task is a subclass in its own file, and an experiment in params/ that names it as `task`. The
trainer, the planner, its search, the report and checkpoints take it from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.hyperparams import AnyParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.model.spec import MetricSums
from lingvo_gshard.sharding import layout


class Task(BaseLayer):
    """A model and its loss.

    A task defines its own weights, features, labels and predictions. The class attributes and class
    methods are read before a model exists: from Params, by `params.task.cls`.
    """

    # The model's stacks of Transformer layers, in the order of the data flow. Each is the name of a
    # setting, with the batch's setting for the length of its rows in tokens. If there are two
    # stacks, the second one reads the first one's output.
    STACKS: ClassVar[Mapping[str, str]] = {}

    # The letters of its tensors' dims, which a table may split; `_` aside.
    DIMS: ClassVar[str] = layout.DIMS

    # The settings for the sizes of vocabularies, by default the prepared data's. Each has a pattern
    # for the paths of the weights with a row for each piece.
    VOCABULARIES: ClassVar[Mapping[str, str]] = {}

    # The modes of its programs. A task with PREDICT can be decoded, by the methods below.
    MODES: ClassVar[frozenset[Mode]] = frozenset({Mode.TRAIN, Mode.EVAL})

    # The unit of `num_tokens`, in texts for people.
    UNIT: ClassVar[str] = "row"

    # The metrics of evaluation that a report shows, besides nll.
    SHOWN: ClassVar[Sequence[str]] = ()

    @classmethod
    def Lengths(cls, batch: AnyParams) -> tuple[int, int]:
        """Returns the numbers of tokens in a row of the source and in a row of the predicted text.

        Without a source the first is 0. A row without tokens, such as an image, counts as one.
        """
        lengths = [batch.Get(setting) for setting in cls.STACKS.values()]
        if not lengths:
            return 0, 1
        source_len = lengths[0] if len(lengths) > 1 else 0
        return source_len, lengths[-1]

    @classmethod
    def DecodeLength(cls, decode: AnyParams) -> int:
        """Returns the longest input of a row in --mode=decode, in tokens; with PREDICT alone."""
        raise NotImplementedError(f"{cls.__name__} is not decoded.")

    @classmethod
    def DecodeSpecs(cls, decode: AnyParams, rows: int, length: int) -> NestedMap:
        """Returns the TensorSpecs of `Predict`'s features: rows of at most `length` tokens."""
        raise NotImplementedError(f"{cls.__name__} is not decoded.")

    def Loss(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the loss of a batch, a scalar, and the terms of its metrics.

        The batch may be one of several microbatches. So a term is a scalar or small tensor whose
        mean over microbatches is the whole batch's: a mean over rows, or a sum over tokens divided
        by `context.tokens_of_mean`. Terms named `num_...` are counts, which are added up. A task
        with stacks calls `context.counted` before them. `num_tokens` is the weight of a batch in
        means over several batches, and is counted as tokens/s.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no Loss.")

    def Metrics(self, terms: NestedMap) -> NestedMap:
        """Returns the metrics to record of a whole batch, given the terms that Loss returned.

        The default returns the terms. A quotient, root or maximum of terms is computed here.
        """
        return terms

    def NumTokens(self, labels: NestedMap) -> tf.Tensor:
        """Returns the number of tokens over which `Loss` is a mean: float32, a scalar.

        Microbatches may have different numbers of tokens, so `Loss` divides by the result of
        `context.tokens_of_mean` for its own number. Raises ValueError if the task's `Loss` does
        not.
        """
        raise ValueError(
            f"train.gradient_accumulation_steps: {type(self).__name__} defines no NumTokens."
        )

    def EvalMetrics(self, metrics: NestedMap) -> MetricSums:
        """Returns the metrics of evaluation for a batch, from the results of `Metrics`.

        Each metric is a name with a weighted sum over the batch and its weight. One of them is
        `nll`, the default metric for comparing checkpoints.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no EvalMetrics.")

    def Predict(self, theta: NestedMap, features: NestedMap, decode: AnyParams) -> NestedMap:
        """Returns the predictions of a batch, tensors whose dim 0 is its rows.

        `decode` are the experiment's settings of that name.
        """
        raise NotImplementedError(f"{type(self).__name__} is not decoded.")

    @classmethod
    def ProductDtype(cls, p: AnyParams) -> str:
        """Returns the dtype of the factors of large products, given the settings."""
        return "float32"
