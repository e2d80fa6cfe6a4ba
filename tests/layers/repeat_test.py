"""A block applied R times: each way equals plain composition, in values and gradients.

B rows, M model; R blocks.
"""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.numerics import Numerics, Remat
from lingvo_gshard.layers.repeat import Carried, Loop, unrolled
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.layers import building
from tests.spmd import functions
from xla_plan.cost.scopes import is_recomputed
from xla_plan.machines import topology

B, M, R = 3, 4, 5
_DIMS = Carried("BM", shared=["BM"], weights=["MH"])


def _block(index, numerics, inputs):
    """Returns the output, a report with a gradient, and one without."""
    (shared,) = inputs.shared
    (weight,) = inputs.weights
    h = tf.tanh(numerics.einsum("BM,MH->BH", inputs.x, weight) + shared)
    y = h * (1.0 + tf.cast(index, h.dtype))
    return Carried(y, reports=[tf.reduce_sum(y**2), tf.stop_gradient(y[0])])


def _loop(remat, x, shared, stack):
    loop = Loop(_block, R, building.Unannotated(), _DIMS, [True], Numerics(remat=remat))
    return loop(Carried(x, [shared], [stack]))


def _unrolled(remat, x, shared, stack):
    reports_by_block = []
    for i in range(R):
        block = unrolled(_block, i, Numerics(remat=remat))
        result = block(Carried(x, [shared], [stack[i]]))
        x = result.x
        reports_by_block.append(result.reports)
    reports = [tf.stack(reports) for reports in zip(*reports_by_block, strict=True)]
    return Carried(x, reports=reports)


_WAYS = {
    "plain": functools.partial(_unrolled, Remat.NONE),
    "recomputed": functools.partial(_unrolled, Remat.BLOCK),
    "recomputed except products": functools.partial(_unrolled, Remat.ALL_BUT_PRODUCTS),
    "loop": functools.partial(_loop, Remat.NONE),
    "recomputed loop": functools.partial(_loop, Remat.BLOCK),
    "recomputed loop except products": functools.partial(_loop, Remat.ALL_BUT_PRODUCTS),
}


def _arrays():
    """x, the shared tensor, and the stack of weights."""
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape) for shape in ((B, M), (B, M), (R, M, M))]


@functools.cache
def _compiled(way):
    @tf.function(jit_compile=True, autograph=False)
    def run(x, shared, stack):
        with tf.GradientTape() as tape:
            tape.watch([x, shared, stack])
            result = _WAYS[way](x, shared, stack)
            squares, rows = result.reports
            factors = tf.range(1.0, R + 1, dtype=squares.dtype)
            loss = tf.reduce_sum(result.x) + tf.reduce_sum(squares * factors)
        return [result.x, squares, rows, *tape.gradient(loss, [x, shared, stack])]

    args = [tf.constant(array) for array in _arrays()]  # float64
    return run(*args), run.experimental_get_compiler_ir(*args)(stage="optimized_hlo")


# Further ways are slow tests.
_QUICK_WAYS = ("plain", "recomputed loop")


@pytest.mark.parametrize(
    "way",
    [way if way in _QUICK_WAYS else pytest.param(way, marks=pytest.mark.slow) for way in _WAYS],
)
def test_values_and_gradients_equal_plain_composition(way):
    for got, want in zip(_compiled(way)[0], _compiled("plain")[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [Remat.NONE, Remat.ALL_BUT_PRODUCTS])
def test_bfloat16_activations_give_float32_weight_gradients(remat):
    x, shared, stack = [array.astype("float32") for array in _arrays()]

    def gradient(way):
        """The gradient of the stack of weights, float32, where activations are bfloat16."""

        @tf.function(jit_compile=True, autograph=False)
        def run(stack):
            with tf.GradientTape() as tape:
                tape.watch(stack)
                narrow_x = tf.cast(x, tf.bfloat16)
                narrow_shared = tf.cast(shared, tf.bfloat16)
                y = way(remat, narrow_x, narrow_shared, stack).x
                loss = tf.reduce_sum(tf.cast(y, tf.float32))
            return tape.gradient(loss, stack)

        return run(tf.constant(stack))

    got = gradient(_loop)
    want = gradient(_unrolled)
    assert got.dtype == want.dtype == tf.float32
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_loop_holds_block_once_or_twice_if_recomputed():
    counts = {way: _compiled(way)[1].count(" tanh(") for way in _WAYS}
    assert counts == {
        "plain": R,
        "recomputed": 2 * R,
        "recomputed except products": 2 * R,
        "loop": 1,
        "recomputed loop": 2,
        "recomputed loop except products": 2,
    }


@pytest.mark.slow
def test_kept_products_are_not_recomputed():
    """One product forward, two for the gradients, and a fourth where the first is recomputed."""
    counts = {way: _compiled(way)[1].count(" dot(") for way in _WAYS if "loop" in way}
    assert counts == {"loop": 3, "recomputed loop": 4, "recomputed loop except products": 3}


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
def test_recomputed_operations_are_named(way):
    names = re.findall(r' tanh\(.*op_name="([^"]*)"', _compiled(way)[1])
    once = 1 if "loop" in way else R
    again = once if "recomputed" in way else 0
    assert len(names) == once + again
    assert sum(is_recomputed(name) for name in names) == again


def _hidden_block(index, numerics, inputs):
    """A ReLU layer whose hidden units BH stay inside, and whose output BM leaves it."""
    del index
    (weight,) = inputs.weights
    hidden = tf.nn.relu(numerics.einsum("BM,MH->BH", inputs.x, weight))
    y = numerics.einsum("BH,HM->BM", hidden, tf.transpose(weight))
    return Carried(inputs.x + tf.sin(y))


def _hidden_loop(hidden_dtype, x, stack):
    dims = Carried("BM", weights=["MH"])
    loop = Loop(_hidden_block, R, building.Unannotated(), dims, [True], _keeping(hidden_dtype))
    return loop(Carried(x, weights=[stack])).x


def _keeping(hidden_dtype):
    return Numerics(remat=Remat.ALL_BUT_PRODUCTS, hidden_dtype=hidden_dtype)


def _hidden_unrolled(hidden_dtype, x, stack):
    for i in range(R):
        entered = Carried(x, weights=[stack[i]])
        x = unrolled(_hidden_block, i, _keeping(hidden_dtype))(entered).x
    return x


@pytest.mark.slow
@pytest.mark.parametrize("apply", [_hidden_loop, _hidden_unrolled])
def test_kept_hidden_units_may_have_16_bits(apply):
    """Only the gradients of weights see more of them than their signs."""
    x, _, stack = [array.astype("float32") for array in _arrays()]

    def run(hidden_dtype):
        @tf.function(jit_compile=True, autograph=False)
        def with_gradients(x, stack):
            with tf.GradientTape() as tape:
                tape.watch([x, stack])
                y = apply(hidden_dtype, x, stack)
            return [y, *tape.gradient(y, [x, stack])]

        args = tf.constant(x), tf.constant(stack)
        return with_gradients(*args), with_gradients.experimental_get_compiler_ir(*args)("hlo")

    (want_y, want_d_x, want_d_stack), _ = run(None)
    (got_y, got_d_x, got_d_stack), text = run("bfloat16")
    np.testing.assert_array_equal(got_y, want_y)
    np.testing.assert_allclose(got_d_x, want_d_x, rtol=1e-5, atol=1e-5)

    largest = np.abs(want_d_stack).max()
    np.testing.assert_allclose(got_d_stack, want_d_stack, atol=0.01 * largest)
    assert np.abs(got_d_stack - want_d_stack).max() > 1e-4 * largest

    # The loop's stacks of the inputs and outputs of blocks are unchanged.
    if apply is _hidden_loop:
        assert f"bf16[{R},{B},{M}]" in text and f"f32[{R},{B},{M}]" in text


@pytest.mark.slow
def test_loops_on_tpu_keep_one_copy_of_the_weights():
    """The TPU computes products in bfloat16, without a second copy of the weights in bfloat16."""
    parts = functions.partitioning(8)
    m = 128
    stack = functions.f32((R, m, m), "RMH")

    def step(state, batch):
        loop = Loop(_block, R, Annotator(parts), _DIMS, [True], Numerics(remat=Remat.BLOCK))
        with tf.GradientTape() as tape:
            tape.watch(state.w)
            result = loop(Carried(batch.x, [batch.x], [state.w]))
            loss = tf.reduce_sum(result.x)

        return NestedMap(state=NestedMap(w=state.w - tape.gradient(loss, state.w)))

    batch = NestedMap(x=functions.f32((64, m), "BM"))
    trees = (NestedMap(w=stack), batch)
    exported = lowering.export(AnnotatedFn("step", step, ("state", "batch"), trees), parts)

    if not topology.is_installed("v3"):
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            topology_executable.compile_program(exported, "v3:2x2")
        return
    text = topology_executable.compile_program(exported, "v3:2x2").compiled.as_text()
    assert f"f32[{R},{m},{m}]" in text and f"bf16[{R},{m},{m}]" not in text


@pytest.mark.parametrize("is_product", [True, False])
def test_gradients_of_biases_keep_their_bits_in_a_loop_of_16_bits(is_product):
    """257 rows, of which bfloat16 has 256 and 258; as a product's gradient it is rounded."""

    def block(index, numerics, inputs):
        del index, numerics
        (bias_ND,) = inputs.weights
        y = tf.cast(inputs.x, tf.float32) + tf.reshape(bias_ND, [-1])
        return Carried(tf.cast(y, inputs.x.dtype))

    rows = 257
    dims = Carried("BM", weights=["ND"])
    numerics = Numerics(remat=Remat.BLOCK)
    loop = Loop(block, R, building.Unannotated(), dims, [is_product], numerics)

    @tf.function(jit_compile=True, autograph=False)
    def gradient(x, stack):
        with tf.GradientTape() as tape:
            tape.watch(stack)
            y = loop(Carried(x, weights=[stack])).x
            loss = tf.reduce_sum(tf.cast(y, tf.float32))
        return tape.gradient(loss, stack)

    got = gradient(tf.ones([rows, 6], tf.bfloat16), tf.ones([R, 2, 3]))
    assert got.dtype == tf.float32
    np.testing.assert_array_equal(got, np.full([R, 2, 3], 256 if is_product else rows))
