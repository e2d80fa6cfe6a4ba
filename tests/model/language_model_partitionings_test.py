"""A whole language model, with Lingvo's layers, under the partitionings that the literature names.

Its layers are a loop, with relative biases and experts, and its softmax is the embedding's table.
"""

import functools
import math

import numpy as np
import pytest

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.norms import RMSNorm
from lingvo_gshard.layers.positions import RelativeBias
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.runs import experiment_programs
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import topology
from lingvo_gshard.train.programs import Programs
from params.language_model import LanguageModelExperiment
from tests import exhaustive
from tests.layers import building
from tests.model import small_language_model as small
from tests.model import small_task
from tests.spmd import compilers

_STEPS = 2
_TWO_DIMS = "sharding=BGE:x,M:y,weights.M:x,HNV:y"
# Of 2, 4 or 8 devices.
_WAYS = {
    "the paper's": ("mesh=d:*", "sharding=BGE:d"),
    "2-D products": ("mesh=x:*,y:2", _TWO_DIMS),
    "2-D products, vocabulary whole": ("mesh=x:*,y:2", "sharding=BGE:x,M:y,weights.M:x,HN:y"),
    "ZeRO-2": ("mesh=d:*", "sharding=BGE:d,mhnv:d"),
    "ZeRO-3": ("mesh=d:*", "sharding=BGEMHNV:d"),
    "softmax by vocabulary": ("mesh=d:*", "sharding=BGEV:d,U:-"),
    "softmax by M": ("mesh=d:*", "sharding=BGE:d,weights.M:d"),
}


class _Experiment(LanguageModelExperiment):
    """Sizes that 8 devices divide."""

    NUM_LAYERS = 4
    MODEL_DIM = 16
    HIDDEN_DIM = 32
    NUM_HEADS = 8
    HEAD_DIM = 4
    NUM_EXPERTS: int | None = 8
    GROUP_SIZE = small.L
    LAYERS_AS = Layers.LOOP
    REMAT = Remat.BLOCK
    DROPOUT = 0.0
    VOCAB_SIZE = 32
    TIED_SOFTMAX = True
    BATCH_SIZE = small.B
    TARGET_LEN = small.L
    MAX_STEPS = 4
    DECAY_START = 10

    def Task(self):
        p = super().Task()
        p.embedding.sinusoids = False
        p.decoder.layer.norm = RMSNorm.Params()
        bias = RelativeBias.Params().Set(num_buckets=4, max_distance=6)
        p.decoder.layer.attention.positions = bias
        p.decoder.dense.Set(activation=Activation.GELU_TANH, gated=True)
        return p


class _Dense(_Experiment):
    NUM_EXPERTS = None


def _specs():
    return small.random_batch(0).Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL"))


def _params(experiment, settings):
    params = experiment.params()
    for setting in settings:
        hyperparams.apply_setting(params, setting)
    return params


@functools.cache
def _training(num_partitions, *settings, experiment=_Experiment):
    """Two steps: the losses of each, the norms of gradients, and the last state."""
    # A small rate, as Adafactor moves a weight by its scale however small its gradient is.
    params = _params(experiment, ("optimizer.schedule.multiplier=0.1", *settings))
    parts = placement.partitioning(params, num_partitions)
    placement.check_divisible(params, parts)

    model = TaskModel(params, parts)
    state = small_task.start_state(model)
    programs = Programs(experiment_programs.in_process(params, parts))
    step = programs.get(Mode.TRAIN, _specs())

    losses = []
    norms = []
    for seed in range(_STEPS):
        result = step(state, small.random_batch(seed).Transform(lambda x: x[None]))
        state = result.state
        losses.append(float(np.asarray(result.metrics.loss)[0]))
        norms.append(result.metrics.gradient_norms.Transform(np.asarray))
    return losses, NestedMap(norms=norms), state.Transform(np.asarray)


def _check(computed, wanted):
    np.testing.assert_allclose(computed[0], wanted[0], rtol=1e-5)
    building.assert_close(computed[1], wanted[1], rtol=1e-3)
    building.assert_close(computed[2], wanted[2], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
@pytest.mark.parametrize("way", _WAYS)
def test_training_equals_that_of_one_device(way, num_partitions):
    _check(_training(num_partitions, *_WAYS[way]), _training(1))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["x:2,y:2", "x:2,y:4"])
def test_a_dense_model_in_blocks_equals_that_of_one_device(mesh):
    """Lingvo's own table."""
    num_partitions = math.prod(int(axis[-1]) for axis in mesh.split(","))
    table = "sharding=B:x,M:y,weights.M:x,HNV:y"
    computed = _training(num_partitions, f"mesh={mesh}", table, experiment=_Dense)
    _check(computed, _training(1, experiment=_Dense))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "way"),
    [
        (4, ("mesh=p:2,d:*", "sharding=R:p,B:d+p,G:d")),
        (8, ("mesh=p:2,d:2,m:*", "sharding=R:p,B:d+p,G:d,HNV:m")),
    ],
)
def test_a_pipeline_of_relative_biases_equals_the_loop(num_partitions, way):
    """Random routing differs by microbatch, and is off."""
    settings = ("task.decoder.moe.gating.second_expert=ALL",)
    stages = ("task.decoder.stages=2", "task.decoder.microbatches=2")
    _check(_training(num_partitions, *way, *settings, *stages), _training(1, *settings))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2-D products", "ZeRO-3"])
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_tables_compile_for_tpus_and_gpus(name, way):
    compilers.need(name)
    params = _params(_Experiment, _WAYS[way])
    parts = placement.partitioning(params, 8)
    program = experiment_programs.in_process(params, parts).step(Mode.TRAIN, _specs())
    report = topology.compile_program(program, name).report()
    # Weights are gathered where they are used.
    assert report.count("all-gather") > 0
