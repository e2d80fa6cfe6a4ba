"""Whole models under the partitionings that the literature names, each a mesh and a table.

Random routing is on: its numbers do not depend on the partitioning.
"""

import functools

import numpy as np
import pytest

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import ModeKeys
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.train import steps
from tests.layers import building
from tests.model import small_task

_STEPS = 3
_ZERO = "sharding=BGE:d,mhnv:d"
_WAYS = {
    "the paper's": (),
    "data parallel": ("sharding=BG:d",),
    "experts x data": ("mesh=data:*,experts:4", "sharding=BG:data+experts,E:experts"),
    "Megatron": ("sharding=HN:d",),
    "experts x data x model": (
        "mesh=data:2,experts:2,model:*",
        "sharding=BG:data+experts,E:experts,HN:model",
    ),
    "weights over M": ("sharding=BGEM:d",),
    "ZeRO-1": (_ZERO, "train.scatter_gradients=False"),
    "ZeRO-2": (_ZERO,),
    "ZeRO-3": ("sharding=BGEMHNV:d",),
    "one weird trick": ("sharding=BGEV:d,U:-",),
    "other devices": ("mesh=a:2,b:*", "sharding=BG:a,HN:b", "device_assignment=[7,6,5,4,0,1,2,3]"),
}


class _Experiment(small_task.Experiment):
    """Sizes that 8 devices divide."""

    MODEL_DIM, HIDDEN_DIM, NUM_HEADS, HEAD_DIM = 16, 32, 8, 4
    GROUP_SIZE, DROPOUT = 6, 0.0
    SOURCE_VOCAB_SIZE, TARGET_VOCAB_SIZE = 24, 32


def _params(*settings):
    params = _Experiment.params()
    params.task.decoder.moe.group_size = 7
    for setting in settings:
        hyperparams.apply_setting(params, setting)
    return params


class _Training:
    """Three steps of one way; losses are of each step."""

    def __init__(self, num_partitions, *settings):
        params = _params(*settings)
        parts = placement.partitioning(params, num_partitions)
        placement.check_divisible(params, parts)
        model = TranslationModel(params, parts)
        programs = steps.Programs(model.model_fn, params, parts, model.state_spec)
        state = NestedMap(
            step=np.int32(0),
            theta=building.random_theta(model.task),
            slots=model.state_spec.slots.Transform(lambda spec: np.zeros(spec.shape, np.float32)),
        )
        self.step = programs.get(ModeKeys.TRAIN, small_task.batch_specs())
        self.losses, self.norms = [], []
        for seed in range(_STEPS):
            batch = small_task.random_batch(seed).Transform(lambda x: x[None])
            result = self.step(state, batch)
            state = result.state
            self.losses.append(float(np.asarray(result.metrics.loss)[0]))
            self.norms.append(result.metrics.gradient_norms.Transform(np.asarray))
        self.state = state.Transform(np.asarray)

    def equals(self, other):
        np.testing.assert_allclose(self.losses, other.losses, rtol=1e-5)
        building.assert_close(NestedMap(norms=self.norms), NestedMap(norms=other.norms), rtol=1e-3)
        building.assert_close(self.state, other.state, rtol=1e-3)


@pytest.fixture(scope="module")
def training():
    """(partitions, *settings) -> _Training, made once."""
    return functools.cache(_Training)


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
def test_training_equals_that_of_one_device(training, way):
    training(8, *_WAYS[way]).equals(training(1))
