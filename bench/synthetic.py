"""Runs of registered experiments on random tokens, so that programs can be timed without data."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.train.programs import Programs

SOURCE_VOCAB_SIZE = 8000
TARGET_VOCAB_SIZE = 4000


def experiment(name: str, settings: Iterable[str] = ()) -> Params:
    """Returns a registered experiment's Params with the vocabulary sizes of this module.

    `settings` have the form `path=value`, like the trainer's --set.
    """
    params = registry.get_params(name, settings)
    params.task.Set(source_vocab_size=SOURCE_VOCAB_SIZE, target_vocab_size=TARGET_VOCAB_SIZE)
    return params


def partitioned_model(params: Params, num_partitions: int) -> TaskModel:
    """Returns the experiment's model, partitioned over `num_partitions` devices."""
    return TaskModel(params, placement.partitioning(params, num_partitions))


def programs(model: TaskModel) -> Programs:
    """Returns the programs of the experiment's model, traced like the trainer's.

    A machine that has cached them, or received them, does not need TensorFlow.
    """
    return Programs(model)


def model_and_state(params: Params, num_partitions: int) -> tuple[TaskModel, NestedMap]:
    """Returns the experiment's partitioned model and its initial state on the devices."""
    model = partitioned_model(params, num_partitions)
    return model, programs(model).initialize(seed=1)


def source_features(batch: int, length: int, seed: int = 0) -> NestedMap:
    """Returns the source features of full rows, each int32 [batch, length]."""
    return _side("source", batch, length, SOURCE_VOCAB_SIZE, seed)


def training_batch(params: Params, seed: int = 0) -> NestedMap:
    """Returns a batch of full rows with the structure of TranslationInput's batches."""
    p = params.input
    features = source_features(p.batch_size, p.source_len, seed)
    features |= _side("target", p.batch_size, p.target_len, TARGET_VOCAB_SIZE, seed + 1)
    weights = np.ones((p.batch_size, p.target_len), np.float32)
    labels = NestedMap(target_labels=features["target_ids"], target_weights=weights)
    return NestedMap(features=NestedMap(features), labels=labels)


class RepeatedBatch:
    """An input for the estimator that repeats one batch without end."""

    def __init__(self, batch: NestedMap) -> None:
        self._batch = batch
        self.specs = specs_of(batch)

    def __iter__(self) -> Iterator[NestedMap]:
        return itertools.repeat(self._batch)

    def get_state(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Changes nothing."""


def specs_of(batch: NestedMap) -> NestedMap:
    """Returns the TensorSpecs of a batch of [B, L] arrays."""
    return batch.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL"))


def _side(side: str, batch: int, length: int, vocab_size: int, seed: int) -> NestedMap:
    random = np.random.default_rng(seed)
    ids = random.integers(4, vocab_size, (batch, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
    return NestedMap(
        {
            f"{side}_ids": ids,
            f"{side}_segment_ids": np.ones_like(ids),
            f"{side}_positions": positions,
        }
    )
