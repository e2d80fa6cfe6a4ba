"""Evaluation metrics report the routing of each MoE layer, not an average over layers."""

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.routing import Routing
from lingvo_gshard.model.task_model import TaskModel
from tests.layers import building
from tests.model import small_task
from tests.spmd import functions

_OF_OTHER_GATINGS = {"dropped_choices", "router_loss"}


def test_every_field_of_routing_is_reported_by_layer():
    params = small_task.Experiment.params()
    for stack in (params.task.encoder, params.task.decoder):
        stack.moe.group_size = 2
    model = TaskModel(params, functions.partitioning(1))
    model.task = params.task.Instantiate(building.Unannotated())  # Runs eagerly.
    state = NestedMap(theta=building.random_theta(model.task).Transform(tf.constant))
    batch = small_task.random_batch(3).Transform(tf.constant)

    found = model.evaluate(state, batch)

    layers = ("encoder_1", "decoder_1")
    names = {"nll", "aux_loss"}
    fields = {field.name for field in dataclasses.fields(Routing)} - _OF_OTHER_GATINGS - {"sent_E"}
    for field in fields | {"load_E", "max_load", "idle_experts"}:
        names |= {f"{field}_{layer}" for layer in layers}
    assert found.sums.keys() == found.weights.keys() == names

    sums = [found.sums[f"aux_loss_{layer}"] for layer in layers]
    np.testing.assert_allclose(found.sums.aux_loss, sum(sums), rtol=1e-6)
    assert sums[0] != sums[1]
    assert {float(weight) for weight in found.weights.values()} == {float(found.weights.nll)}
