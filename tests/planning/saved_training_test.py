"""What `plan --save` saves is what the trainer calls."""

import pickle
import re
import types

import jax
import pytest

from lingvo_gshard.input import packing
from lingvo_gshard.model.spec import ModeKeys
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.planning import planner, programs
from lingvo_gshard.spmd import executable, saved_executable, specs, topology
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train import run

_SETTINGS = [
    "task.source_vocab_size=24",
    "task.target_vocab_size=16",
    "input.batch_size=16",
    "input.source_len=8",
    "input.target_len=8",
    "task.dim=8",
    "train.iterations_per_loop=2",
    "train.max_steps=4",
]
_SETTINGS += [
    f"task.{stack}.{setting}"
    for stack in ("encoder", "decoder")
    for setting in (
        "num_layers=2",
        "dense.hidden_dim=12",
        "layer.attention.num_heads=2",
        "layer.attention.head_dim=4",
        "moe.hidden_dim=12",
        "moe.group_size=16",
    )
]


@pytest.fixture
def asked(monkeypatch):
    """A request for a topology whose place two devices at hand take."""
    monkeypatch.setattr(topology, "devices", lambda name: jax.devices()[:2])
    monkeypatch.setattr(topology, "compile_program", lambda program, name: compile_program(program))
    monkeypatch.setattr(planner, "in_own_process", lambda function, request: function(request))
    return planner.request("toy.MoE8E4L", "v3:2x2", _SETTINGS, None)


@pytest.mark.slow
def test_the_trainers_program_is_saved(asked, tmp_path, monkeypatch):
    folder = tmp_path / "executables"
    text = planner.save_training(asked, folder)
    assert text.startswith("saved the compiled program train_2 ")
    assert text.endswith(f"`trainer --executables={folder}` loads it")
    params = asked.params
    estimator = run.make_estimator(params, str(tmp_path / "run"), 2, str(folder))
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)  # Nothing is compiled from here on.
    p = params.input
    batch = packing.batch_specs(p.batch_size, packing.RowShape(p.source_len, p.target_len))
    loaded = estimator._programs.get(ModeKeys.TRAIN, batch, 2)
    assert loaded.program.name == "train_2" and loaded.report().count("all-to-all") > 0


@pytest.mark.slow
def test_the_search_that_is_planned_is_the_one_that_a_run_decodes_with(asked, tmp_path):
    estimator = run.make_estimator(asked.params, str(tmp_path), 2)
    decoded = run.Run(None, estimator)._predict_program(asked.params.decode.max_source_len)
    model = TranslationModel(asked.params, asked.partitioning)
    planned = programs.export("decode", model, asked.params)

    def text(program):
        return executable.lower(program, specs.device_mesh(program.partitioning)).as_text()

    assert re.sub(r"@[\w.$-]+", "", text(planned)) == re.sub(r"@[\w.$-]+", "", text(decoded))


@pytest.fixture
def exported(monkeypatch):
    """Exports nothing; returns the numbers of steps that were asked for."""
    numbers = []

    def export(name, model, params, num_steps):
        numbers.append(num_steps)
        return types.SimpleNamespace(name=f"{name}_{num_steps}")

    monkeypatch.setattr(programs, "export", export)
    return numbers


def test_there_is_one_for_each_number_of_steps_in_a_call(asked, exported, tmp_path, monkeypatch):
    asked.params.train.max_steps = 7
    names = []
    monkeypatch.setattr(topology, "compile_program", lambda program, name: program)
    monkeypatch.setattr(saved_executable, "save", lambda made, folder: names.append(made.name))
    text = planner.save_training(asked, tmp_path)
    assert exported == [2, 1] and names == ["train_2", "train_1"]
    assert text.startswith("saved the compiled programs train_2, train_1 ")


def test_a_program_that_is_too_large_is_not_saved(asked, exported, tmp_path, monkeypatch):
    def refuse(program, name):
        raise topology.OutOfMemoryError(f"topology {name}: too large", "details")

    monkeypatch.setattr(topology, "compile_program", refuse)
    with pytest.raises(ValueError, match="^topology v3:2x2: too large$") as caught:
        planner.save_training(asked, tmp_path / "executables")
    assert type(pickle.loads(pickle.dumps(caught.value))) is ValueError
    assert not (tmp_path / "executables").exists()
