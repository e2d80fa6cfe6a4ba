"""The layers of NLLB's models: training and searches on partitions, and for other machines.

That they compute what transformers does is tested in tests/hugging_face.

B batch, T source length, L target length.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.beam_search.beam import Rules, Stopping
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building
from tests.model import small_task, steps_of_task
from tests.model.small_task import TARGET_VOCAB, B, L, T
from tests.spmd import functions
from tests.xla_spmd import compilers
from xla_spmd.mesh import Mesh

_FIRST = 7


def _set(task, layers_as=Layers.LOOP, dispatch=Dispatch.EINSUM):
    """Sets these models' features: biases, one table, blocks of three layers, one of experts."""
    task.Set(source_vocab_size=TARGET_VOCAB, shared_embeddings=True, start_piece=2)
    task.embedding.first_position = 2
    for stack in (task.encoder, task.decoder):
        stack.Set(num_layers=6, moe_every=3, layers_as=layers_as, remat=Remat.ALL_BUT_PRODUCTS)
        stack.layer.norm.epsilon = 1e-5
        stack.layer.attention.biases = True
        stack.dense.biases = True
        stack.moe.Set(biases=True, dispatch=dispatch)
    return task


def _experiment():
    p = small_task.Experiment.params()
    _set(p.task)
    p.task.decoder.moe.group_size = 2 * L
    p.decode.Set(rules=Rules.HUGGING_FACE, stopping=Stopping.LIKELY, forces_first=True)
    return p


@functools.cache
def _trained(num_partitions, letters, dispatch):
    params = _set(small_task.task_params(), dispatch=dispatch)
    mesh = Mesh.flat(num_partitions)
    table = Partitioning.from_dict(mesh, dict.fromkeys(letters, "d")) if letters else None
    theta = building.random_theta(params.Instantiate(building.Unannotated()))
    return steps_of_task.trained(params, table, theta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "letters", "dispatch"),
    [
        pytest.param(2, "HNV", Dispatch.EINSUM, marks=pytest.mark.exhaustive),
        pytest.param(4, "BGE", Dispatch.EINSUM, marks=pytest.mark.exhaustive),
        (8, "BGE", Dispatch.EINSUM),
        pytest.param(8, "BGE", Dispatch.RAGGED, marks=pytest.mark.exhaustive),
    ],
)
def test_partitioned_training_equals_unpartitioned(num_partitions, letters, dispatch):
    got = _trained(num_partitions, letters, dispatch)
    want = _trained(1, "", dispatch)
    building.assert_close(got, want, rtol=1e-3)
    assert np.abs(want.d_theta.target_embedding.table).max(1).min() > 0  # By the softmax alone.


def _found(num_partitions):
    """Returns Predict's results; every second row begins with a forced token."""
    params = _experiment()
    partitioning = functions.partitioning(num_partitions)
    task = params.task.Instantiate(Annotator(partitioning))
    features = small_task.source_batch(5, pad_last=True)
    features.first_ids = np.where(np.arange(B) % 2, _FIRST, -1).astype(np.int32)
    specs = {"source_ids": "BL", "source_segment_ids": "BL", "source_positions": "BL"}
    executable = building.compile_fn(
        lambda theta, features: task.Predict(theta, features, params.decode),
        partitioning,
        {"ids": "B__", "lengths": "B_", "scores": "B_", "token_log_probs": "B__"},
        theta=building.theta_specs(task),
        features=NestedMap(
            {name: TensorSpec((B, T), "int32", dims) for name, dims in specs.items()},
            first_ids=TensorSpec((B,), "int32", "B"),
        ),
    )
    found = executable(building.random_theta(task), features)
    return found.Transform(np.asarray)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
def test_partitioned_searches_equal_unpartitioned(num_partitions):
    got = _found(num_partitions)
    want = _found(1)
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_allclose(got.scores, want.scores, atol=1e-4)

    # The forced token costs nothing, and only rows that have one begin with it.
    begins = want.ids[:, 0, 0]
    assert (begins[1:-1:2] == _FIRST).all() and (begins[:-1:2] != _FIRST).any()
    assert (want.token_log_probs[1:-1:2, 0, 0] == 0).all()
    assert want.lengths[-1, 0] == 0  # A row that is padding.


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*exhaustive.only(Mode.TRAIN), Mode.PREDICT])
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_they_compile_for_tpus_and_gpus(name, mode):
    compilers.need(name)
    params = _experiment()
    parts = functions.partitioning(8)
    if mode is Mode.TRAIN:
        specs = small_task.batch_specs()
        program = Programs(TaskModel(params, parts), in_process=True).exported(mode, specs)
    else:
        params.decode.batch_size = B
        program = Programs(TaskModel(params, parts), in_process=True).decoder(T)
    report = topology_executable.compile_program(program, name).report()
    assert report.count("all-reduce") + report.count("all-gather") > 0


def test_one_table_needs_one_vocabulary_and_a_start_piece_in_it():
    task = _set(small_task.task_params())
    with pytest.raises(ValueError, match="shared_embeddings needs one vocabulary .* 19 and .* 23"):
        task.Copy().Set(source_vocab_size=19).Instantiate(building.Unannotated())
    with pytest.raises(ValueError, match="task.start_piece must be 0 to 22, got 23"):
        task.Copy().Set(start_piece=23).Instantiate(building.Unannotated())


def test_only_the_first_position_becomes_the_start_piece():
    task = _set(small_task.task_params()).Instantiate(building.Unannotated())
    theta = building.random_theta(task).Transform(tf.constant)
    ids = tf.constant([[1, 5, 1]])
    positions = tf.constant([[0, 1, 2]])
    layer = task.target_embedding
    context = steps_of_task.Context(Mode.EVAL)
    want = layer.FProp(theta.target_embedding, tf.constant([[2, 5, 1]]), positions, context)
    got = task._embed_target(theta, ids, positions, context)
    np.testing.assert_array_equal(got, want)
