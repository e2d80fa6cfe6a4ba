"""Recipes: the settings on which an experiment's programs depend."""

import pickle
import types

import pytest

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.spmd import tracer
from lingvo_gshard.train.programs import Programs

_ROWS = packing.batch_specs(4, packing.RowShape(16, 16))


@pytest.fixture
def asked(monkeypatch):
    """Returns the identities of an experiment's traced programs with `path=value` settings."""

    def ask(*settings):
        params = registry.get_params("toy.MoE8E4L", settings)
        params.task.Set(source_vocab_size=30, target_vocab_size=40)
        model = TaskModel(params, placement.partitioning(params, 2))
        identities = []

        def traced(function, recipe):
            identities.append(tracer._identity((function, recipe)))
            # As another process gets it.
            copied = pickle.loads(pickle.dumps(recipe))
            assert tracer._identity((function, copied)) == identities[-1]
            return types.SimpleNamespace(results=NestedMap(state=model.state_spec))

        monkeypatch.setattr(tracer, "traced", traced)
        programs = Programs(model)
        programs.initializer()
        programs.exported(Mode.TRAIN, _ROWS, 2)
        programs.exported(Mode.EVAL, _ROWS)
        programs.decoder(16)
        return identities

    return ask


@pytest.mark.parametrize(
    "setting", ["train.max_steps=9", "train.iterations_per_loop=7", "input.batch_size=64"]
)
def test_settings_of_the_loop_and_the_data_do_not_change_programs(asked, setting):
    assert asked(setting) == asked()


def test_settings_of_decoding_change_only_that_program(asked):
    before, after = asked(), asked("decode.beam_size=7")
    assert before[:3] == after[:3] and before[3] != after[3]


@pytest.mark.parametrize(
    "setting", ["train.seed=7", "task.encoder.num_layers=6", "optimizer.decay_exponent=0.9"]
)
def test_settings_of_the_model_change_every_program(asked, setting):
    for before, after in zip(asked(), asked(setting), strict=True):
        assert before != after
