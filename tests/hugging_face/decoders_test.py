"""Mixtral, Qwen3-MoE, OLMoE and Hunyuan 3 equal transformers': see write_decoders.py.

B batch, L length, V vocabulary.
"""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.model import placement
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from tests import exhaustive
from tests.hugging_face import decoders
from tests.layers import building
from xla_spmd.mesh import Mesh

_LOOP = ("task.decoder.layers_as=LOOP",)
_UNROLLED = ("task.decoder.layers_as=UNROLLED",)


def _assert_close(name, logits, golden):
    order = decoders.source(name).config.order()
    theirs = np.empty_like(logits)
    theirs[..., order] = logits
    np.testing.assert_allclose(theirs[: len(golden)], golden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", decoders.NAMES)
@pytest.mark.parametrize("settings", [pytest.param(_LOOP, marks=pytest.mark.slow), _UNROLLED])
def test_logits(name, settings):
    golden = decoders.golden(name)
    task = decoders.params(name, *settings).task.Instantiate(building.Unannotated())
    theta = decoders.weights(name, task).Transform(tf.constant)
    features = decoders.features(decoders.ours(name, golden["ids"])).Transform(tf.constant)
    logits, _ = task.FProp(theta, features, Context(Mode.EVAL))
    _assert_close(name, logits.numpy(), golden["logits"])


def _partitioning(num_partitions):
    """The devices' table, where there are several copies of the experts on 8."""
    if num_partitions == 8:
        return building.REPLICATED_EXPERTS
    # Heads are split, too, of which there are half as many for keys and values.
    return Partitioning.from_dict(Mesh.flat(num_partitions), dict.fromkeys("BGUEN", "d"))


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(1, 2, 4), 8])
@pytest.mark.parametrize("name", decoders.NAMES)
def test_logits_on_partitions(name, num_partitions):
    golden = decoders.golden(name)
    partitioning = _partitioning(num_partitions)
    task = decoders.params(name).task.Instantiate(Annotator(partitioning))

    # Further rows fill the batch up to a multiple of the devices.
    ids = decoders.ours(name, golden["ids"])
    features = decoders.features(np.resize(ids, (8, ids.shape[1])))
    executable = building.compile_fn(
        lambda theta, batch: NestedMap(logits=task.FProp(theta, batch, Context(Mode.EVAL))[0]),
        partitioning,
        {"logits": "ULV"},
        theta=building.theta_specs(task),
        batch=features.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL")),
    )
    got = executable(decoders.weights(name, task), features)
    _assert_close(name, np.asarray(got.logits), golden["logits"])


def _predict(task, decode, theta, features):
    found = task.Predict(theta, features, decode)
    return NestedMap(ids=found.ids[:, 0], lengths=found.lengths[:, 0])


def _prompts(name, golden):
    prompts = decoders.features(decoders.ours(name, golden["prompts"]), golden["prompt_lengths"])
    prompts.seeds = np.zeros((len(prompts.ids), 2), np.int32)
    return prompts


def _assert_found(name, found, greedy):
    """Compares found ids with theirs, which are -1 after EOS."""
    theirs = decoders.source(name).config.order()[np.asarray(found.ids)]
    is_token = np.arange(theirs.shape[1]) < np.asarray(found.lengths)[:, None]
    np.testing.assert_array_equal(np.where(is_token, theirs, -1), greedy)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", *exhaustive.only("hy_v3", "mixtral", "olmoe")])
def test_greedy_search_of_200_prompts(name):
    golden = decoders.golden(name)
    params = decoders.params(name)
    decode = params.decode.Set(max_target_len=golden["greedy"].shape[1])
    task = params.task.Instantiate(building.Unannotated())
    theta = decoders.weights(name, task).Transform(tf.constant)
    prompts = _prompts(name, golden)

    predict = tf.function(functools.partial(_predict, task, decode), jit_compile=True)
    found = predict(theta, prompts.Transform(tf.constant))
    assert len(found.ids) == 200
    _assert_found(name, found, golden["greedy"])


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
@pytest.mark.parametrize("name", ["mixtral", "hy_v3"])
def test_greedy_search_on_partitions(name, num_partitions):
    golden = {key: value[::25] for key, value in decoders.golden(name).items() if key != "logits"}
    params = decoders.params(name)
    decode = params.decode.Set(max_target_len=golden["greedy"].shape[1])
    partitioning = _partitioning(num_partitions)
    task = params.task.Instantiate(Annotator(partitioning))
    prompts = _prompts(name, golden)
    assert len(prompts.ids) == 8

    executable = building.compile_fn(
        functools.partial(_predict, task, decode),
        partitioning,
        {"ids": "B_", "lengths": "B"},
        theta=building.theta_specs(task),
        batch=prompts.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "B_")),
    )
    _assert_found(name, executable(decoders.weights(name, task), prompts), golden["greedy"])


def _num_active_weights(params):
    """Returns the number of scalars in the weights that a token uses: of experts, k of E."""
    specs = params.task.Instantiate(Annotator(_partitioning(1))).weight_specs
    return round(math.fsum(math.prod(spec.shape) * spec.share_used for spec in specs.Flatten()))


@pytest.mark.parametrize("name", decoders.NAMES)
def test_weights_are_counted_as_in_transformers(name):
    params = decoders.params(name)
    counts = decoders.counts(name)
    assert placement.num_weights(params) == counts["all"]
    assert _num_active_weights(params) == counts["active"]


# transformers 5.24.0's counts, with its modules on torch's meta device.
_RELEASED = {
    "open_moe.Mixtral8x7B": (46_702_792_704, 12_879_925_248),
    "open_moe.Qwen3MoE30B": (30_532_122_624, 3_353_032_704),
    "open_moe.OLMoE7B": (6_919_161_856, 1_282_017_280),
    "open_moe.HyMT2MoE30B": (30_064_725_888, 3_451_867_008),
}


@pytest.mark.parametrize("name", _RELEASED)
def test_released_models_have_the_weights_of_transformers(name):
    params = registry.get_params(name)
    assert (placement.num_weights(params), _num_active_weights(params)) == _RELEASED[name]
