"""The trainer's programs, saved for it; CPU devices stand for a TPU's."""

import dataclasses
import types

import jax
import pytest

from lingvo_gshard.input import packing
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.plans import run_programs, topology_executable, trainer_executables
from lingvo_gshard.runs import run
from lingvo_gshard.spmd import saved_executable
from tests.plans import tiny
from xla_plan.machines import topology


@pytest.fixture
def training(cpu):
    """A run on two cores whose calls have two training steps."""
    params = tiny.params().Set(**{"train.iterations_per_loop": 2, "train.max_steps": 4})
    parts = placement.partitioning(params, 2)
    return tiny.request(params=params, partitioning=parts)


@pytest.mark.slow
def test_the_trainers_program_is_saved(training, tmp_path, monkeypatch):
    """It is found by its computation, and so is the same program with any partitioning."""
    folder, params = tmp_path / "executables", training.params
    params.Set(mesh="e:*,m:2", sharding="BGE:e,H:m,m:e")
    asked = dataclasses.replace(training, partitioning=placement.partitioning(params, 4))
    assert trainer_executables.save(asked, folder) == ["train_2"]
    estimator = run.make_estimator(params, str(tmp_path / "run"), 4, str(folder))
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # Nothing is compiled from here on.
    p = params.input
    batch = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    loaded = estimator._programs.get(Mode.TRAIN, batch, 2)
    assert loaded.program.name == "train_2" and loaded.report().count("all-to-all") > 0


@pytest.fixture
def exported(monkeypatch):
    """Exports nothing; returns the requested numbers of steps."""
    numbers = []

    def export(name, model, params, num_steps):
        numbers.append(num_steps)
        return types.SimpleNamespace(name=f"{name}_{num_steps}")

    monkeypatch.setattr(run_programs, "export", export)
    return numbers


def _compiled(program, peak_gib):
    peak_bytes = peak_gib * 2**30
    return types.SimpleNamespace(
        name=program.name, report=lambda: types.SimpleNamespace(peak_bytes=peak_bytes)
    )


def test_a_program_is_saved_for_each_number_of_steps(training, exported, tmp_path, monkeypatch):
    training.params.train.max_steps = 7
    names = []
    monkeypatch.setattr(
        topology_executable, "compile_program", lambda program, _: _compiled(program, 1)
    )
    monkeypatch.setattr(saved_executable, "save", lambda made, folder: names.append(made.name))
    assert trainer_executables.save(training, tmp_path) == names == ["train_2", "train_1"]
    assert exported == [2, 1]


def test_a_program_that_is_too_large_is_not_saved(training, exported, tmp_path, monkeypatch):
    def refuse(program, name):
        raise topology.OutOfMemoryError(f"topology {name}: too large")

    monkeypatch.setattr(topology_executable, "compile_program", refuse)
    with pytest.raises(ValueError, match="^topology v3:2x2: too large$"):
        trainer_executables.save(training, tmp_path / "executables")
    assert not (tmp_path / "executables").exists()


def test_a_program_that_is_compiled_and_does_not_fit_is_not_saved(
    training, exported, tmp_path, monkeypatch
):
    """Such programs exist for GPUs, whose compiler accepts programs of any size."""
    monkeypatch.setattr(
        topology_executable, "compile_program", lambda program, _: _compiled(program, 17)
    )
    with pytest.raises(ValueError, match=r"^train_2 needs 17\.00 of 15\.48 GiB: not saved\.$"):
        trainer_executables.save(training, tmp_path / "executables")
    assert not (tmp_path / "executables").exists()
