"""A saved program runs without TensorFlow; a damaged or unsuitable one is refused."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest

from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import lowering, program
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from xla_spmd.mesh import Mesh


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
from xla_spmd.runtime import environment
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


@pytest.mark.slow
def test_a_saved_program_runs_where_tensorflow_cannot_be_imported(tmp_path):
    fn = functions.sgd_step()
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(fn.args))
    lowering.export(fn, functions.partitioning(4)).save(tmp_path / "sgd.program")
    np.savez(tmp_path / "in.npz", **weights, **batch)
    files = [str(tmp_path / name) for name in ("sgd.program", "in.npz", "out.npz")]
    subprocess.run([sys.executable, "-c", _RUN_SAVED, *files], check=True)
    got, want = np.load(files[2]), functions.numpy_sgd(weights, batch)
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
        (3, "has version 3, this lingvo_gshard reads 2; export it again"),
        (0, "has version 0, this lingvo_gshard reads 2; export it again"),
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


def test_without_shardy_a_program_is_refused(shardy_off):
    exported = lowering.export(functions.sgd_step(), functions.partitioning(2))
    with pytest.raises(ValueError, match="program sgd: .* needs JAX's Shardy partitioner, which"):
        compile_program(exported)
    jax.config.update("jax_use_shardy_partitioner", True)
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(exported.args))
    functions.close(compile_program(exported)(weights, batch), functions.numpy_sgd(weights, batch))


def test_more_partitions_than_devices():
    exported = lowering.export(functions.sgd_step(), functions.partitioning(16))
    with pytest.raises(ValueError, match="16 partitions need as many devices, 8 were found"):
        compile_program(exported)
    with pytest.raises(ValueError, match="16 partitions need as many devices, 3 were found"):
        compile_program(exported, jax.devices()[:3])
