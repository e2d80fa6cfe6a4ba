"""Partitioned equals unpartitioned."""

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental import jax2tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import annotated_fn, lowering, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from xla_spmd.hlo import compiled_report, hlo_module
from xla_spmd.mesh import Mesh


@pytest.mark.parametrize("num_partitions", [1, 2, 8])
def test_gradient_step_equals_numpy(num_partitions):
    fn = functions.sgd_step()
    executable = compile_program(lowering.export(fn, functions.partitioning(num_partitions)))
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(fn.args))
    got = executable(weights, batch)
    assert got.hidden_BH.addressable_shards[0].data.shape == (16 // num_partitions, 6)
    functions.close(got, functions.numpy_sgd(weights, batch))


@pytest.mark.parametrize("num_partitions", [1, 2, 8])
def test_moe_dispatch_equals_numpy_in_two_all_to_alls(num_partitions):
    parts = functions.partitioning(num_partitions)
    fn = functions.moe_dispatch(parts)
    executable = compile_program(lowering.export(fn, parts))
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(fn.args))
    sent = np.einsum("gsec,gsm->egcm", batch.mask_GSEC, batch.x_GSM)
    hidden = np.maximum(np.einsum("egcm,emh->egch", sent, weights.wi_EMH), 0)
    back = np.einsum("egch,ehm->gecm", hidden, weights.wo_EHM)
    want = np.einsum("gsec,gecm->gsm", batch.mask_GSEC, back)
    np.testing.assert_allclose(executable(weights, batch).y_GSM, want, rtol=1e-4, atol=1e-4)
    report = executable.report()
    assert report.count("all-to-all") == (2 if num_partitions > 1 else 0)
    assert report.count("all-reduce") == report.count("all-gather") == 0


def test_two_axes_and_a_permuted_device_order():
    mesh = Mesh(("x", "y"), (2, 4), (3, 1, 0, 2, 7, 5, 6, 4))
    parts = Partitioning.from_dict(mesh, {"B": "x", "H": "y"})
    fn = functions.sgd_step()
    fn.args[0].wi_MH = functions.f32((5, 8), "MH")
    fn.args[0].wo_HV = functions.f32((8, 3), "HV")
    executable = compile_program(lowering.export(fn, parts))
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(fn.args))
    placed = executable.place("weights", weights)
    assert placed.wi_MH.addressable_shards[0].data.shape == (5, 2)
    functions.close(executable(placed, batch), functions.numpy_sgd(weights, batch))


def test_a_loop_and_random_numbers_inside():
    parts = functions.partitioning(4)
    annotate = Annotator(parts).annotate

    def fn(state: NestedMap) -> NestedMap:
        def body(i, x_BM):
            seed = tf.stack([i, 7])
            noise = tf.random.stateless_uniform([8, 3], seed, alg="threefry")
            return i + 1, annotate(x_BM * 2 + annotate(noise, "BM"), "BM")

        _, x_BM = tf.while_loop(
            lambda i, _: i < 5, body, [tf.constant(0), state.x_BM], maximum_iterations=5
        )
        return NestedMap(state=NestedMap(x_BM=x_BM))

    args = (NestedMap(x_BM=functions.f32((8, 3), "BM")),)
    executable = compile_program(
        lowering.export(AnnotatedFn("loop", fn, ("state",), args, donate=("state",)), parts)
    )
    noise = tf.function(  # Only XLA has a threefry kernel for the CPU.
        lambda seed: tf.random.stateless_uniform([8, 3], seed, alg="threefry"), jit_compile=True
    )
    want = np.ones((8, 3), np.float32)
    for i in range(5):
        want = want * 2 + noise(tf.constant([i, 7])).numpy()
    got = executable(NestedMap(x_BM=np.ones((8, 3), np.float32))).state.x_BM
    np.testing.assert_allclose(got, want, rtol=1e-6)


def _few_slices():
    """Returns a function with 2 slices on 4 devices, and its gradient."""

    def fn(batch: NestedMap) -> NestedMap:
        with tf.GradientTape() as tape:
            tape.watch(batch.x)
            y = annotate.split(tf.einsum("ab,bc->ac", batch.x, batch.w), 1, 2)
            loss = tf.reduce_sum(tf.square(y))
        return NestedMap(y=y, d_x=tape.gradient(loss, batch.x))

    args = (NestedMap(x=functions.f32((8, 5), "__"), w=functions.f32((5, 6), "__")),)
    return AnnotatedFn("few", fn, ("batch",), args)


@pytest.mark.slow
def test_both_propagators_give_the_same_numbers(shardy_off):
    """Shardy's program is the library's, and GSPMD's is jitted as TensorFlow lowers it.

    Without Shardy, JAX 0.10 cannot call an export.
    """
    parts = functions.partitioning(4)
    mesh = specs.device_mesh(parts)
    for fn in (functions.sgd_step(), functions.moe_dispatch(parts), _few_slices()):
        trees = [functions.randoms(arg, seed) for seed, arg in enumerate(fn.args)]
        function, results = annotated_fn.trace(fn, parts)
        ins = [leaf for arg in fn.args for leaf in specs.shardings(parts, arg, mesh).Flatten()]
        outs = specs.shardings(parts, results, mesh).Flatten()
        call = jax2tf.call_tf(function, has_side_effects=False)
        jitted = jax.jit(call, in_shardings=tuple(ins), out_shardings=outs)
        lowered = jitted.lower(*(leaf for tree in trees for leaf in tree.Flatten()))
        assert "sdy." not in lowered.as_text()
        older = lowered.compile()
        got = results.Pack(older(*(leaf for tree in trees for leaf in tree.Flatten())))
        jax.config.update("jax_use_shardy_partitioner", True)
        executable = compile_program(lowering.export(fn, parts))
        functions.close(got, executable(*trees))
        counts = compiled_report.read(fn.name, older, hlo_module.read(older)).collectives
        assert counts == executable.report().collectives
        jax.config.update("jax_use_shardy_partitioner", False)


def test_the_gradient_of_a_strided_slice_without_elements_is_refused_in_one_line():
    def fn(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch.x)
            loss = tf.reduce_sum(batch.x[5:2:2])
        return NestedMap(gradient=tape.gradient(loss, batch.x))

    annotated = AnnotatedFn("sliced", fn, ("batch",), (NestedMap(x=functions.f32((8, 3), "__")),))
    message = "^program sliced: TensorFlow lowers an operator to a wrong shape: .*no element.$"
    with pytest.raises(ValueError, match=message):
        lowering.export(annotated, functions.partitioning(2))
