"""What an experiment learns, as all other rooms see it: they ask a task, never its class.

A new task is a subclass in a file of its own, and an experiment in params/ that names it as `task`.
The trainer, the planner, its search, the report and checkpoints take it from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.model import flops
from lingvo_gshard.model.spec import MetricSums


class Task(BaseLayer):
    """A model and its loss. Its weights, features, labels and predictions are its own business.

    The class attributes and class methods are asked before there is a model: of Params, by
    `params.task.cls`.
    """

    # The model's stacks of Transformer layers, which are settings of those names, in the order that
    # data flows, and the setting of a batch that is the length of their rows in tokens. If there
    # are two, the second one reads what the first one has made of the source.
    STACKS: ClassVar[Mapping[str, str]] = {}

    # The settings that are sizes of vocabularies: those of the prepared data, unless they are set.
    # Each with a pattern of the paths of the weights that have a row for each piece.
    VOCABULARIES: ClassVar[Mapping[str, str]] = {}

    # The modes of its programs. A task with PREDICT is decoded, by the methods below.
    MODES: ClassVar[frozenset[Mode]] = frozenset({Mode.TRAIN, Mode.EVAL})

    # What `num_tokens` counts, in texts for people.
    UNIT: ClassVar[str] = "row"

    # The metrics of evaluation that a report shows, besides nll.
    SHOWN: ClassVar[Sequence[str]] = ()

    @classmethod
    def Lengths(cls, batch: hyperparams.Params) -> tuple[int, int]:
        """Returns a batch's tokens in a row of the source, and in one of what is predicted.

        Without a source the first is 0. A row without tokens, such as an image, counts as one.
        """
        lengths = [batch.Get(setting) for setting in cls.STACKS.values()]
        if not lengths:
            return 0, 1
        source_len = lengths[0] if len(lengths) > 1 else 0
        return source_len, lengths[-1]

    @classmethod
    def ReadsSource(cls, path: str) -> bool:
        """Returns whether the weight of this path is multiplied by the source's tokens."""
        del path
        return False

    @classmethod
    def DecodeLength(cls, decode: hyperparams.Params) -> int:
        """Returns the longest input of a row in --mode=decode, in tokens; with PREDICT alone."""
        raise NotImplementedError(f"{cls.__name__} is not decoded.")

    @classmethod
    def DecodeSpecs(cls, decode: hyperparams.Params, rows: int, length: int) -> NestedMap:
        """Returns the TensorSpecs of `Predict`'s features: rows of at most `length` tokens."""
        raise NotImplementedError(f"{cls.__name__} is not decoded.")

    def Loss(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the loss of a batch, a scalar, and its metrics.

        The metrics are scalars and small tensors to record. `num_tokens` is what means over several
        batches are weighed by, and is counted as tokens/s.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no Loss.")

    def NumTokens(self, labels: NestedMap) -> tf.Tensor:
        """Returns the number of tokens over which `Loss` is a mean: float32, a scalar.

        A microbatch may have more of them than another, so `Loss` divides by what
        `context.tokens_of_mean` makes of its own number. Raises ValueError if the task's does not.
        """
        raise ValueError(
            f"train.gradient_accumulation_steps: {type(self).__name__} defines no NumTokens."
        )

    def EvalMetrics(self, metrics: NestedMap) -> MetricSums:
        """Returns the metrics of evaluation for a batch, from those of `Loss`.

        By name, a weighted sum over the batch and its weight. One of them is `nll`, by which
        checkpoints are compared if the experiment names no other.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no EvalMetrics.")

    def Predict(
        self, theta: NestedMap, features: NestedMap, decode: hyperparams.Params
    ) -> NestedMap:
        """Returns the predictions of a batch, tensors whose dim 0 is its rows.

        `decode` are the experiment's settings of that name.
        """
        raise NotImplementedError(f"{type(self).__name__} is not decoded.")

    @classmethod
    def ProductDtype(cls, p: hyperparams.Params) -> str:
        """Returns the dtype of the numbers that large products are made of, given the settings."""
        del p
        return "float32"

    def TrainStepFlops(self, rows: int, source_len: int, target_len: int) -> float:
        """Returns the operations that a step mathematically needs, on rows without padding."""
        if not self.STACKS:
            raise NotImplementedError(f"{type(self).__name__} defines no TrainStepFlops.")
        stacks = [self.p.Get(stack) for stack in self.STACKS]
        return flops.train_step_flops(
            self.weight_specs, stacks, self.ReadsSource, rows, source_len, target_len
        )
