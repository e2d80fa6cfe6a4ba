"""Partitioned equals unpartitioned; a saved program runs without TensorFlow."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental import jax2tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.hlo import compiled_report, hlo_module
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import annotated_fn, lowering, program, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions


def _numpy_sgd(weights: NestedMap, batch: NestedMap) -> NestedMap:
    """The perceptron's step by hand: backpropagation written out."""
    pre = batch.x_BM @ weights.wi_MH
    hidden = np.maximum(pre, 0)
    error = hidden @ weights.wo_HV - batch.y_BV
    d_out = 2 * error / error.size
    d_hidden = (d_out @ weights.wo_HV.T) * (pre > 0)
    return NestedMap(
        weights=NestedMap(
            wi_MH=weights.wi_MH - 0.1 * batch.x_BM.T @ d_hidden,
            wo_HV=weights.wo_HV - 0.1 * hidden.T @ d_out,
        ),
        loss=np.mean(error**2),
        hidden_BH=hidden,
    )


def _close(got: NestedMap, want: NestedMap) -> None:
    for (path, a), (expected, b) in zip(got.FlattenItems(), want.FlattenItems(), strict=True):
        assert path == expected
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("num_partitions", [1, 2, 8])
def test_gradient_step_equals_numpy(num_partitions):
    fn = functions.sgd_step()
    executable = compile_program(lowering.export(fn, functions.partitioning(num_partitions)))
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(fn.args))
    got = executable(weights, batch)
    assert got.hidden_BH.addressable_shards[0].data.shape == (16 // num_partitions, 6)
    _close(got, _numpy_sgd(weights, batch))


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
    _close(executable(placed, batch), _numpy_sgd(weights, batch))


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
    noise = tf.function(  # TensorFlow alone has no threefry kernel for the CPU; XLA has.
        lambda seed: tf.random.stateless_uniform([8, 3], seed, alg="threefry"), jit_compile=True
    )
    want = np.ones((8, 3), np.float32)
    for i in range(5):
        want = want * 2 + noise(tf.constant([i, 7])).numpy()
    got = executable(NestedMap(x_BM=np.ones((8, 3), np.float32))).state.x_BM
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_many_calls_in_a_row_do_not_deadlock():
    parts = functions.partitioning(8)
    fn = functions.moe_dispatch(parts)
    executable = compile_program(lowering.export(fn, parts))
    trees = [functions.randoms(arg, seed) for seed, arg in enumerate(fn.args)]
    placed = [executable.place(name, tree) for name, tree in zip(fn.arg_names, trees, strict=True)]
    results = [executable(*placed).y_GSM for _ in range(200)]
    np.testing.assert_array_equal(results[0], results[-1])


_RUN_SAVED = """
import sys
sys.modules["tensorflow"] = None  # Any import of it fails from here on.
from lingvo_gshard.spmd import environment
environment.prepare(num_devices=4)
import numpy as np
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import program
from lingvo_gshard.spmd.executable import compile_program
saved = program.load(sys.argv[1])
data = np.load(sys.argv[2])
weights = NestedMap(wi_MH=data["wi_MH"], wo_HV=data["wo_HV"])
out = compile_program(saved)(weights, NestedMap(x_BM=data["x_BM"], y_BV=data["y_BV"]))
np.savez(sys.argv[3], loss=out.loss, wi_MH=out.weights.wi_MH)
"""


def test_a_saved_program_runs_where_tensorflow_cannot_be_imported(tmp_path):
    fn = functions.sgd_step()
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(fn.args))
    lowering.export(fn, functions.partitioning(4)).save(tmp_path / "sgd.program")
    np.savez(tmp_path / "in.npz", **weights, **batch)
    files = [str(tmp_path / name) for name in ("sgd.program", "in.npz", "out.npz")]
    subprocess.run([sys.executable, "-c", _RUN_SAVED, *files], check=True)
    got, want = np.load(files[2]), _numpy_sgd(weights, batch)
    np.testing.assert_allclose(got["loss"], want.loss, rtol=1e-5)
    np.testing.assert_allclose(got["wi_MH"], want.weights.wi_MH, rtol=1e-4, atol=1e-5)


def test_save_and_load_keep_every_field(tmp_path):
    mesh = Mesh(("x", "y"), (2, 4), (3, 1, 0, 2, 7, 5, 6, 4))
    fn = functions.sgd_step()
    saved = lowering.export(fn, Partitioning.from_dict(mesh, {"B": "x"}))
    saved.save(tmp_path / "p")
    assert program.load(tmp_path / "p") == saved


def test_damage_is_found(tmp_path):
    path = tmp_path / "p"
    lowering.export(functions.sgd_step(), functions.partitioning(2)).save(path)
    whole = path.read_bytes()
    for position in (-1, 60, 200):
        data = bytearray(whole)
        data[position] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match="damaged"):
            program.load(path)


def test_a_cut_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "p"
    lowering.export(functions.sgd_step(), functions.partitioning(2)).save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        program.load(path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a program"):
        program.load(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (2, "has version 2, this lingvo_gshard reads 1; export it again"),
        (0, "has version 0, this lingvo_gshard reads 1; export it again"),
    ],
)
def test_a_file_of_another_version_is_refused(tmp_path, monkeypatch, version, message):
    saved = lowering.export(functions.sgd_step(), functions.partitioning(2))
    monkeypatch.setattr(program, "_VERSION", version)
    saved.save(tmp_path / "p")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=message):
        program.load(tmp_path / "p")


@pytest.mark.parametrize("exported", [b"", b"of another JAX" * 50])
def test_an_export_that_jax_cannot_read_is_refused(exported):
    saved = lowering.export(functions.sgd_step(), functions.partitioning(2))
    with pytest.raises(ValueError, match=r"program sgd: JAX [\d.]+ cannot read its export"):
        compile_program(dataclasses.replace(saved, exported=exported))


def test_a_loaded_program_on_too_few_devices(tmp_path):
    mesh = Mesh(("x", "y"), (2, 4))
    parts = Partitioning.from_dict(mesh, {"B": "x"})
    lowering.export(functions.sgd_step(), parts).save(tmp_path / "p")
    message = "program sgd: 8 partitions need as many devices, 3 were found; .*'x': 2, 'y': 4"
    with pytest.raises(ValueError, match=message):
        compile_program(program.load(tmp_path / "p"), jax.devices()[:3])


@pytest.fixture
def shardy_off():
    """XLA's older propagation, which JAX still has; Shardy is its default."""
    assert jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


def test_both_partitioners_give_the_same_numbers(shardy_off):
    """With Shardy off JAX 0.10 calls no exported program: there the function is jitted as it is."""
    parts = functions.partitioning(4)
    mesh = specs.device_mesh(parts)
    for fn in (functions.sgd_step(), functions.moe_dispatch(parts)):
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
        _close(got, executable(*trees))
        counts = compiled_report.read(fn.name, older, hlo_module.read(older)).collectives
        assert counts == executable.report().collectives
        jax.config.update("jax_use_shardy_partitioner", False)


def test_without_shardy_a_program_is_refused(shardy_off):
    exported = lowering.export(functions.sgd_step(), functions.partitioning(2))
    with pytest.raises(ValueError, match="program sgd: .* needs JAX's Shardy partitioner, which"):
        compile_program(exported)
    jax.config.update("jax_use_shardy_partitioner", True)
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(exported.args))
    _close(compile_program(exported)(weights, batch), _numpy_sgd(weights, batch))


def test_more_partitions_than_devices():
    exported = lowering.export(functions.sgd_step(), functions.partitioning(16))
    with pytest.raises(ValueError, match="16 partitions need as many devices, 8 were found"):
        compile_program(exported)
    with pytest.raises(ValueError, match="16 partitions need as many devices, 3 were found"):
        compile_program(exported, jax.devices()[:3])
