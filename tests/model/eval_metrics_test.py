"""An evaluation tells how every MoE layer routed, not an average over them."""

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.gating import Routing
from lingvo_gshard.model.spec import ModeKeys
from lingvo_gshard.model.translation_model import TranslationModel
from params.experiment import TranslationExperiment
from tests.layers import building
from tests.model import small_task


class _Experiment(TranslationExperiment):
    NUM_LAYERS, MODEL_DIM, HIDDEN_DIM, NUM_HEADS, HEAD_DIM = 4, 8, 10, 2, 3
    NUM_EXPERTS, GROUP_SIZE = 8, 2
    SOURCE_VOCAB_SIZE, TARGET_VOCAB_SIZE = small_task.SOURCE_VOCAB, small_task.TARGET_VOCAB
    BATCH_SIZE, SOURCE_LEN, TARGET_LEN = small_task.B, small_task.T, small_task.L
    MAX_STEPS = 4


def test_every_scalar_of_routing_by_layer():
    model = TranslationModel(_Experiment.params(), building.Unannotated())
    state = NestedMap(theta=building.random_theta(model.task).Transform(tf.constant))
    batch = small_task.random_batch(3).Transform(tf.constant)
    found = model.model_fn(state, batch.features, batch.labels, ModeKeys.EVAL, None).eval_metrics
    scalars = {field.name for field in dataclasses.fields(Routing)} - {"load_E"}
    layers = ("encoder_1", "decoder_1")
    assert found.keys() == {"nll", "aux_loss"} | {
        f"{s}_{layer}" for s in scalars for layer in layers
    }
    sums = [found[f"aux_loss_{layer}"][0] for layer in layers]
    np.testing.assert_allclose(found["aux_loss"][0], sum(sums), rtol=1e-6)
    assert sums[0] != sums[1]
