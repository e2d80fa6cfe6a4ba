"""Executables saved by another process give equal results; refusals name the file."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from lingvo_gshard.spmd import lowering, saved_executable
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.saved_executable import SavedExecutables
from tests.spmd import functions

_SAVE = """
import sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=8)
from lingvo_gshard.spmd import saved_executable
from tests.spmd import saved_executable_test as test
for partitions in (1, 4):
    compiled = test.compile_program(test.program(partitions))
    saved_executable.save(compiled, f"{sys.argv[1]}/{partitions}")
"""


def program(num_partitions=4, annotated=None):
    """Returns the program sgd, or a program of `annotated`."""
    parts = functions.partitioning(num_partitions)
    return lowering.export(annotated or functions.sgd_step(), parts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes a folder with the folders `1` and `4`: sgd for that many partitions."""
    made = tmp_path_factory.mktemp("saved")
    subprocess.run([sys.executable, "-c", _SAVE, str(made)], check=True)
    return made


@pytest.fixture
def four(saved, tmp_path):
    """Copies the folder `4`, so that a test can change it."""
    for path in (saved / "4").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def _results(run):
    args = [functions.randoms(arg, seed) for seed, arg in enumerate(run.program.args)]
    return [np.asarray(leaf) for leaf in run(*args).Flatten()]


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [1, 4])
def test_it_is_loaded_and_behaves_as_if_compiled(saved, compiled, num_partitions):
    exported = program(num_partitions)
    loaded = SavedExecutables(saved / str(num_partitions)).load_or_compile(exported)
    assert not compiled
    fresh = compile_program(exported)
    for got, want in zip(_results(loaded), _results(fresh), strict=True):
        np.testing.assert_array_equal(got, want)
    assert loaded.report() == fresh.report()
    assert "ENTRY" in loaded.compiled.as_text()
    weights, batch = (functions.randoms(arg, 0) for arg in exported.args)
    placed = loaded.place("weights", weights)
    assert loaded(placed, batch).hidden_BH.sharding == fresh(weights, batch).hidden_BH.sharding
    assert all(leaf.is_deleted() for leaf in placed.Flatten())


@pytest.mark.slow
def test_a_missing_program_is_compiled(four, compiled, caplog):
    exported = program(4, functions.moe_dispatch(functions.partitioning(4)))
    run = SavedExecutables(four).load_or_compile(exported)
    assert run.program is exported and len(compiled) == 1
    assert caplog.messages == [f"{four}/moe.json does not exist; moe is compiled."]


@pytest.mark.slow
def test_another_program_of_the_same_name_is_not_used(four, compiled, caplog):
    annotated = functions.sgd_step()
    trace = annotated.fn

    def other(weights, batch):
        return trace(weights.Transform(lambda leaf: 2.0 * leaf), batch)

    annotated = dataclasses.replace(annotated, fn=other)
    exported = program(4, annotated)
    run = SavedExecutables(four).load_or_compile(exported)
    assert len(compiled) == 1
    assert caplog.messages == [
        f"{four}/sgd.executable has other settings or code; sgd is compiled."
    ]
    for got, want in zip(_results(run), _results(compile_program(exported)), strict=True):
        np.testing.assert_array_equal(got, want)


def _refused(folder, message, num_partitions=4, devices=None):
    with pytest.raises(ValueError, match=message) as caught:
        SavedExecutables(folder).load_or_compile(program(num_partitions), devices)
    assert "\n" not in str(caught.value)


def _change(folder, **facts):
    path = folder / "sgd.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.slow
def test_another_machine_is_refused(four, compiled):
    _refused(four, "sgd.json is for num_devices 4, not 2; save it again", 2)
    _refused(four, r"is for device_ids \[0, 1, 2, 3\], not \[4, ", 4, jax.devices()[4:])
    _change(four, device_kind="TPU v3")
    _refused(four, "sgd.json is for device_kind 'TPU v3', not 'cpu'; save it again")
    _change(four, platform="tpu")
    _refused(four, "sgd.json is for platform 'tpu', not 'cpu'; save it again")
    assert not compiled


@pytest.mark.slow
def test_another_version_is_refused(four, compiled):
    _change(four, versions={"jax": "0.1", "jaxlib": "0.1"})
    _refused(four, rf"for versions {{'jax': '0.1', .* not {{'jax': '{jax.__version__}'")
    assert not compiled


@pytest.mark.slow
def test_damage_is_refused(four, compiled):
    path = four / "sgd.executable"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    _refused(four, r"sgd.executable is damaged, its checksum does not match; save it again")
    path.unlink()
    _refused(four, "sgd.executable is missing; save it again")
    (four / "sgd.json").write_text('{"platform": "cpu"}')
    _refused(four, "sgd.json is damaged .KeyError.*; save it again")
    (four / "sgd.json").unlink()
    _refused(four, "no saved executables there; `plan model --save` writes them")
    assert not compiled


@pytest.mark.slow
def test_unserializable_programs_are_refused(saved, four, monkeypatch):
    def refuse(compiled):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no\nmore")

    monkeypatch.setattr(saved_executable.serialize_executable, "serialize", refuse)
    run = SavedExecutables(four).load_or_compile(program())
    with pytest.raises(ValueError, match="^program sgd cannot be saved: UNIMPLEMENTED: no$"):
        saved_executable.save(run, four)


def test_functions_are_numbered():
    """TensorFlow's function names differ between processes, but other symbols matter."""

    def digest(name, target):
        text = f"func.func private @{name}(%0)\ncall @{name}()\ncustom_call @{target}()"
        lowered = type("Lowered", (), {"as_text": lambda self: text})()
        return saved_executable._program_digest(exported, lowered)

    exported = program(1)
    assert digest("while_body_12.3", "Sharding") == digest("while_body_345.3", "Sharding")
    assert digest("while_body_12.3", "Sharding") != digest("while_body_12.3", "TopK")
