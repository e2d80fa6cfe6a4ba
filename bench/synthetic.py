"""A run of a registered experiment on made-up tokens: no data is needed to time a program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train import steps

SOURCE_VOCAB_SIZE, TARGET_VOCAB_SIZE = 8000, 4000


def experiment(name: str) -> Params:
    """A registered experiment's Params with vocabularies of 8000 and 4000."""
    params = registry.get_params(name)
    params.task.Set(source_vocab_size=SOURCE_VOCAB_SIZE, target_vocab_size=TARGET_VOCAB_SIZE)
    return params


def model_and_state(params: Params, num_partitions: int) -> tuple[TranslationModel, NestedMap]:
    """The experiment's model over `num_partitions` devices and its first state."""
    partitioning = Partitioning.from_dict(Mesh.flat(num_partitions), params.sharding)
    model = TranslationModel(params, partitioning)
    initializer = steps.initializer(model.init_state, model.state_spec)
    make = compile_program(lowering.export(initializer, partitioning))
    return model, make(NestedMap(seed=np.array([1, 0], np.int32))).state


def source_features(batch: int, length: int, seed: int = 0) -> NestedMap:
    """source_ids, source_segment_ids and source_positions of full rows, int32 [batch, length]."""
    return _side("source", batch, length, SOURCE_VOCAB_SIZE, seed)


def training_batch(params: Params, seed: int = 0) -> NestedMap:
    """A batch of full rows, as TranslationInput gives it."""
    p = params.input
    features = source_features(p.batch_size, p.source_len, seed)
    features |= _side("target", p.batch_size, p.target_len, TARGET_VOCAB_SIZE, seed + 1)
    weights = np.ones((p.batch_size, p.target_len), np.float32)
    labels = NestedMap(target_labels=features["target_ids"], target_weights=weights)
    return NestedMap(features=NestedMap(features), labels=labels)


class Endless:
    """An estimator's input that gives one batch again and again."""

    def __init__(self, batch: NestedMap, specs: NestedMap) -> None:
        self._batch, self.specs = batch, specs

    def __iter__(self) -> Iterator[NestedMap]:
        return itertools.repeat(self._batch)

    def get_state(self) -> dict[str, Any]:
        """It has none."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on as before."""


def specs_of(batch: NestedMap) -> NestedMap:
    """The TensorSpecs of a batch of [B, L] arrays."""
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
