"""A pipeline of stages equals the loop over the same blocks: loss, gradients and reports.

B batch, L target length, T source length, M model.
"""

import functools

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.layers.transformer import Source, TransformerStack
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from tests.layers import building
from tests.spmd import functions

B, L, T, M, E = 8, 6, 4, 8, 4
_DENSE, _SPARSE = {"R": "p", "B": "d"}, {"R": "p", "B": ("e", "d"), "G": ("e", "d"), "E": "e"}
_ONE = Partitioning(Mesh.flat(1), ())


def _parts(table, **axes):
    return Partitioning.from_dict(Mesh(tuple(axes), tuple(axes.values())), table)


def _params(*, sparse=False, source=False, dropout=0.0, **settings):
    p = TransformerStack.Params().Set(dim=M, num_layers=4, layers_as=Layers.LOOP)
    p.Set(remat=Remat.BLOCK, **settings)
    p.layer.Set(has_source=source)
    p.layer.attention.Set(num_heads=2, head_dim=3)
    p.layer.attention.dropout.rate = p.layer.residual_dropout.rate = dropout
    p.dense.hidden_dim = 10
    if sparse:
        second = SecondExpert.RANDOM if dropout else SecondExpert.ALL
        p.moe.Set(hidden_dim=5, num_experts=E, group_size=L, second_expert=second)
    else:
        p.moe = None
    return p


def _specs(source):
    specs = NestedMap(x=functions.f32((B, L, M), "BLM"), valid=functions.f32((B, L), "BL"))
    specs.mask = functions.f32((B, L, L), "BL_")
    if source:
        specs.encoded = functions.f32((B, T, M), "BTM")
        specs.source_mask = functions.f32((B, L, T), "BLT")
    return specs


def _inputs(source):
    inputs = functions.randoms(_specs(source), 1)
    for name in inputs.keys() & {"valid", "mask", "source_mask"}:
        inputs[name] = (inputs[name] > -0.5).astype("float32")
    return inputs


@functools.cache
def _step(parts=_ONE, **settings):
    """The compiled loss, reports, and gradients of the weights and inputs."""
    params = _params(**settings)
    stack, has_source = params.Instantiate(Annotator(parts), "stack"), params.layer.has_source

    def fn(theta, inputs):
        context = Context(Mode.TRAIN, tf.constant([3, 5]))
        watched = NestedMap(theta=theta, x=inputs.x)
        source = None
        if has_source:
            watched.encoded = inputs.encoded
            source = Source(inputs.encoded, inputs.source_mask)
        with tf.GradientTape() as tape:
            tape.watch(watched.Flatten())
            y, reports = stack.FProp(theta, inputs.x, inputs.mask, inputs.valid, source, context)
            aux = [report.routing.aux_loss for report in reports if report.routing]
            loss = tf.reduce_mean(tf.square(y - 1.0)) + 10.0 * tf.add_n(aux or [0.0])
        gradients = tape.gradient(loss, watched.Flatten(), unconnected_gradients="zero")
        return NestedMap(
            loss=loss,
            aux=NestedMap({str(i): each for i, each in enumerate(aux)}),
            rms=NestedMap({str(i): report.rms for i, report in enumerate(reports)}),
            gradients=watched.Pack(gradients),
        )

    theta, specs = building.theta_specs(stack), _specs(has_source)
    dims = building.dims_of(gradients=NestedMap(theta=theta, x=specs.x))
    return building.compile_fn(fn, parts, dims, theta=theta, inputs=specs)


def _run(parts=_ONE, **settings):
    stack = _params(**settings).Instantiate(building.Unannotated())
    inputs = _inputs(settings.get("source", False))
    result = _step(parts, **settings)(building.random_theta(stack), inputs)
    return result.Transform(np.asarray)


def _assert_equal(got, want, atol=1e-5):
    """Reports' means over microbatches are those over the batch only if they are linear."""
    for each in (got, want):
        del each["rms"]
    building.assert_close(got, want, atol=atol)
