"""A whole language model, with Lingvo's layers, under the partitionings that the literature names.

Its layers are a loop, with relative biases and experts, and its softmax is the embedding's table.
"""

import functools
import math

import pytest

from lingvo_gshard.core import hyperparams
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.gating_layers import Scores, TopKGating
from lingvo_gshard.layers.norms import HeadRMSNorm, Over, RMSNorm
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.positions import RelativeBias
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.train.programs import Programs
from params.language_model import LanguageModelExperiment
from tests import exhaustive
from tests.model import small_language_model as small
from tests.model import steps_of_task
from tests.xla_spmd import compilers

_STEPS = 2
_TWO_DIMS = "sharding=BGE:x,M:y,weights.M:x,HNV:y"
# Of 2, 4 or 8 devices.
_WAYS = {
    "2-D products": ("mesh=x:*,y:2", _TWO_DIMS),
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


class _OfToday(_Experiment):
    """Fewer heads of keys and values, norms of heads, a dense layer first, and caps."""

    def Task(self):
        p = super().Task().Set(logit_cap=30.0, z_loss_weight=1e-3)
        p.decoder.moe_layers = (1, 2, 3)
        p.decoder.layer.attention.Set(
            num_kv_heads=4, head_norm=HeadRMSNorm.Params().Set(over=Over.ALL_HEADS), logit_cap=5.0
        )
        p.decoder.moe.gating = TopKGating.Params().Set(
            k=2, scores=Scores.SIGMOID, scale=2.5, bias_rate=0.001
        )
        p.decoder.moe.num_shared = 1
        return p


def _specs():
    return small.random_batch(0).Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL"))


def _params(experiment, settings):
    params = experiment.params()
    for setting in settings:
        hyperparams.apply_setting(params, setting)
    return params


@functools.cache
def _trained(num_partitions, *settings, experiment=_Experiment):
    """Two steps."""
    # A small rate, as Adafactor moves a weight by its scale however small its gradient is.
    params = _params(experiment, ("optimizer.schedule.multiplier=0.1", *settings))
    placement.check_divisible(params, placement.partitioning(params, num_partitions))
    batches = [small.random_batch(seed) for seed in range(_STEPS)]
    return steps_of_task.training(params, num_partitions, batches)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
@pytest.mark.parametrize("way", ["2-D products", *exhaustive.only(*[*_WAYS][1:])])
def test_training_equals_one_device(way, num_partitions):
    steps_of_task.assert_same_training(_trained(num_partitions, *_WAYS[way]), _trained(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "way"),
    [
        pytest.param(2, "ZeRO-3", marks=pytest.mark.exhaustive),
        pytest.param(4, "2-D products", marks=pytest.mark.exhaustive),
        (8, "2-D products"),
        pytest.param(8, "ZeRO-3", marks=pytest.mark.exhaustive),
    ],
)
def test_todays_settings_equal_one_device(num_partitions, way):
    found = _trained(num_partitions, *_WAYS[way], experiment=_OfToday)
    steps_of_task.assert_same_training(found, _trained(1, experiment=_OfToday))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*exhaustive.only("x:2,y:2"), "x:2,y:4"])
def test_a_dense_model_in_blocks_equals_one_device(mesh):
    """Lingvo's own table."""
    num_partitions = math.prod(int(axis[-1]) for axis in mesh.split(","))
    table = "sharding=B:x,M:y,weights.M:x,HNV:y"
    found = _trained(num_partitions, f"mesh={mesh}", table, experiment=_Dense)
    steps_of_task.assert_same_training(found, _trained(1, experiment=_Dense))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "way"),
    [
        pytest.param(4, ("mesh=p:2,d:*", "sharding=R:p,B:d+p,G:d"), marks=pytest.mark.exhaustive),
        (8, ("mesh=p:2,d:2,m:*", "sharding=R:p,B:d+p,G:d,HNV:m")),
    ],
)
def test_a_pipeline_of_relative_biases_equals_the_loop(num_partitions, way):
    """Random routing differs by microbatch, and is off."""
    settings = ("task.decoder.moe.gating.second_expert=ALL",)
    stages = ("task.decoder.stages=2", "task.decoder.microbatches=2")
    found = _trained(num_partitions, *way, *settings, *stages)
    steps_of_task.assert_same_training(found, _trained(1, *settings))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2-D products", *exhaustive.only("ZeRO-3")])
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_tables_compile_for_tpus_and_gpus(name, way):
    compilers.need(name)
    params = _params(_Experiment, _WAYS[way])
    parts = placement.partitioning(params, 8)
    program = Programs(TaskModel(params, parts), in_process=True).exported(Mode.TRAIN, _specs())
    report = topology_executable.compile_program(program, name).report()
    # Weights are gathered where they are used.
    assert report.count("all-gather") > 0
