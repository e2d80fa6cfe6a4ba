"""Writing at a place known when the program runs."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.cache import write_at
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building
from tests.spmd import functions

B, P, D, UPDATE = 8, 7, 3, 2


@pytest.fixture(scope="module", params=[1, 8])
def executable(request):
    parts = functions.partitioning(request.param)

    def fn(state):
        cache = write_at(state.cache, state.new, state.place)
        return NestedMap(cache=Annotator(parts).annotate(cache, "BTD"))

    specs = NestedMap(
        cache=functions.f32((B, P, D), "BTD"),
        new=functions.f32((B, UPDATE, D), "BTD"),
        place=TensorSpec((), "int32", ""),
    )
    return building.compile_fn(fn, request.param, {"cache": "BTD"}, state=specs)


def _arrays():
    rng = np.random.default_rng(1)
    return tuple(rng.standard_normal((B, n, D)).astype("float32") for n in (P, UPDATE))


@pytest.mark.parametrize("place", [0, 2, 5, 6])
def test_the_places_and_no_other(executable, place):
    cache, new = _arrays()
    got = executable(NestedMap(cache=cache, new=new, place=np.array(place, "int32"))).cache
    start = min(place, P - UPDATE)
    cache[:, start : start + UPDATE] = new
    np.testing.assert_array_equal(got, cache)


def test_a_write_stays_local(executable):
    report = executable.report()
    assert sum(count for _, count in report.collectives) == 0


def test_integers_too():
    @tf.function(jit_compile=True, autograph=False)
    def fn(place):
        return write_at(tf.zeros([2, 3], tf.int32), tf.ones([2, 1], tf.int32), place)

    assert fn(tf.constant(1)).numpy().tolist() == [[0, 1, 0]] * 2
