"""Whole models under the partitionings that the literature names, each a mesh and a table.

Random routing is on: its numbers do not depend on the partitioning.
"""

import functools
import math

import numpy as np
import pytest

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building
from tests.model import small_task, steps_of_task

_STEPS = 3
_ROUNDED = "task.product_dtype=bfloat16"
_ZERO = "sharding=BGE:d,mhnv:d"
# "An Efficient 2D Method": the mesh splits activations and weights into blocks.
_TWO_DIMS = "sharding=BGE:x,M:y,weights.M:x,HNV:y"
_TWO_DIMS_AND_EXPERTS = "sharding=BG:x+e,E:e,M:y,weights.M:x,HNV:y"
# Stacks with their own tables.
_DATA_THEN_MODEL = "sharding=BG:d,HNV:m,encoder.BG:d+m,encoder.HN:-"
_TWO_DIMS_THEN_ZERO = (
    "sharding=BG:x,encoder.M:y,encoder.weights.M:x,encoder.HN:y,decoder.BG:x+y,decoder.m:x"
)
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
    "2-D products": ("mesh=x:4,y:2", _TWO_DIMS),
    "2-D products x experts": ("mesh=x:2,e:2,y:*", _TWO_DIMS_AND_EXPERTS),
    "stacks: data parallel, then Megatron": ("mesh=d:4,m:2", _DATA_THEN_MODEL),
    "stacks: one weird trick": ("sharding=BGE:d,encoder.BG:-,encoder.EHN:d",),
    "stacks: 2-D products, then ZeRO": ("mesh=x:4,y:2", _TWO_DIMS_THEN_ZERO),
}

# These cover the other ones, which are parts of them or similar cases.
_ALWAYS = (
    "the paper's",
    "experts x data x model",
    "ZeRO-3",
    "2-D products x experts",
    "stacks: 2-D products, then ZeRO",
)

_LOOP = [f"task.{stack}.layers_as=LOOP" for stack in ("encoder", "decoder")]
_LOOP += [f"task.{stack}.num_layers=4" for stack in ("encoder", "decoder")]


_DENSE = "dense"  # Not a setting: the model without experts.


class _Experiment(small_task.Experiment):
    """Sizes that 8 devices divide."""

    MODEL_DIM = 16
    HIDDEN_DIM = 32
    NUM_HEADS = 8
    HEAD_DIM = 4
    GROUP_SIZE = 6
    DROPOUT = 0.0
    SOURCE_VOCAB_SIZE = 24
    TARGET_VOCAB_SIZE = 32


class _DenseExperiment(_Experiment):
    NUM_EXPERTS = None


def _params(*settings):
    if _DENSE in settings:
        params = _DenseExperiment.params()
    else:
        params = _Experiment.params()
        params.task.decoder.Set(num_layers=1, **{"moe.group_size": 7})
    for setting in settings:
        if setting == _DENSE:
            continue
        hyperparams.apply_setting(params, setting)
    return params


@functools.cache
def _trained(num_partitions, *settings):
    """Three steps of one way."""
    params = _params(*settings)
    placement.check_divisible(params, placement.partitioning(params, num_partitions))
    batches = [small_task.random_batch(seed) for seed in range(_STEPS)]
    return steps_of_task.training(params, num_partitions, batches)


def _losses(trained):
    return [metrics.loss.item() for metrics in trained.metrics]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [*_ALWAYS, *exhaustive.only(*(way for way in _WAYS if way not in _ALWAYS))]
)
def test_training_equals_one_device(way):
    steps_of_task.assert_same_training(_trained(8, *_WAYS[way]), _trained(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [(), *exhaustive.only(_LOOP, (_DENSE,))], ids=["experts", "loops", "dense"]
)
@pytest.mark.parametrize("mesh", [*exhaustive.only("x:1,y:1", "x:1,y:2", "x:2,y:2"), "x:2,y:4"])
@pytest.mark.parametrize(
    "table", [*exhaustive.only(_TWO_DIMS), _TWO_DIMS_THEN_ZERO], ids=["2-D", "by stack"]
)
def test_tables_with_rows_of_some_tensors_train_alike_on_any_number_of_devices(table, mesh, model):
    # A small rate, as Adafactor moves a weight by its scale however small its gradient is.
    settings = ("optimizer.schedule.multiplier=0.1", *model)
    num_partitions = math.prod(int(axis[-1]) for axis in mesh.split(","))
    found = _trained(num_partitions, f"mesh={mesh}", table, *settings)
    steps_of_task.assert_same_training(found, _trained(1, *settings))


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
def test_bfloat16_products_train_alike_on_any_number_of_devices(num_partitions):
    """A sum in another order may round a factor the other way, but routing is float32."""
    few = _losses(_trained(num_partitions, _ROUNDED))
    one = _losses(_trained(1, _ROUNDED))
    exact = _losses(_trained(1))
    np.testing.assert_allclose(few, one, rtol=1e-3)
    np.testing.assert_allclose(one, exact, rtol=0.01)
    assert one != exact


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        ("mesh=p:2,d:*", "sharding=R:p,B:d+p"),
        *exhaustive.only(
            ("mesh=p:2,d:2,e:*", "sharding=R:p,BG:d+e,E:e"),
            ("mesh=d:2,m:2,p:*", "sharding=R:p,B:d+p,G:d,HNV:m"),
        ),
    ],
    ids=["pipeline", "pipeline x experts x data", "pipeline x data x model"],
)
def test_training_in_stages_equals_the_loop(way):
    """Random numbers differ by microbatch, and are off."""
    settings = ["optimizer.schedule.multiplier=0.1", "task.input_dropout.rate=0.0"]
    stages = []
    for stack in ("encoder", "decoder"):
        names = [f"task.{stack}.{each}" for each in ("layers_as", "remat", "num_layers")]
        settings += map("=".join, zip(names, ("LOOP", "BLOCK", "4"), strict=True))
        settings += [f"task.{stack}.moe.gating.second_expert=ALL"]
        for dropout in ("attention.dropout", "residual_dropout"):
            settings += [f"task.{stack}.layer.{dropout}.rate=0.0"]
        stages += [f"task.{stack}.stages=2", f"task.{stack}.microbatches=2"]
    found = _trained(8, *way, *settings, *stages)
    steps_of_task.assert_same_training(found, _trained(1, *settings))


@functools.cache
def _answers(num_partitions, *settings):
    """The metrics of evaluation and the tokens of decoding."""
    params = _params(*_LOOP, f"decode.batch_size={small_task.B}", *settings)
    parts = placement.partitioning(params, num_partitions)
    model = TaskModel(params, parts)
    state = small_task.start_state(model)
    programs = Programs(model, in_process=True)
    evaluate = programs.get(Mode.EVAL, small_task.batch_specs())
    metrics = evaluate(state, small_task.random_batch(1))

    decode = compile_program(programs.decoder(small_task.T))
    features = small_task.source_batch(2)
    found = decode(NestedMap(theta=state.theta), NestedMap(features=features))
    return metrics.Transform(np.asarray), np.asarray(found.predictions.ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        ("mesh=p:2,e:2,m:*", "sharding=BG:e,E:e,HNV:m,R:p"),
        *exhaustive.only(
            ("mesh=x:2,e:2,y:*", _TWO_DIMS_AND_EXPERTS), ("mesh=x:4,y:2", _TWO_DIMS_THEN_ZERO)
        ),
    ],
    ids=["everything", "2-D products x experts", "by stack"],
)
def test_other_tables_evaluate_and_decode_as_one_device(way):
    metrics, ids = _answers(8, *way)
    wanted, wanted_ids = _answers(1)
    building.assert_close(metrics, wanted, rtol=1e-4)
    np.testing.assert_array_equal(ids, wanted_ids)


@pytest.mark.slow
def test_bfloat16_products_evaluate_and_decode_alike():
    metrics, ids = _answers(8, _ROUNDED)
    wanted, wanted_ids = _answers(1)
    nll = [value for path, value in metrics.FlattenItems() if "nll" in path]
    wanted_nll = [value for path, value in wanted.FlattenItems() if "nll" in path]
    assert nll and not np.array_equal(nll, wanted_nll)
    np.testing.assert_allclose(nll, wanted_nll, rtol=0.01)
    assert np.mean(ids == wanted_ids) > 0.9
