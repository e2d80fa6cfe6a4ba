"""What an experiment's programs depend on, and what they do not."""

import pytest

from lingvo_gshard import registry
from lingvo_gshard.input import packing
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.runs.experiment_programs import ExperimentPrograms
from lingvo_gshard.spmd import tracer

_ROWS = packing.batch_specs(4, packing.RowShape(16, 16))


@pytest.fixture
def asked(monkeypatch):
    """Returns the identities of what is traced for settings `path=value` of an experiment."""

    def ask(*settings):
        params = registry.get_params("toy.MoE8E4L", settings)
        params.task.Set(source_vocab_size=30, target_vocab_size=40)
        programs = ExperimentPrograms(params, placement.partitioning(params, 2))
        texts = []
        monkeypatch.setattr(
            tracer, "traced", lambda function, *args: texts.append([*map(tracer._identity, args)])
        )
        programs.initializer()
        programs.step(Mode.TRAIN, _ROWS, 2)
        programs.step(Mode.EVAL, _ROWS)
        programs.decoder(16)
        return texts

    return ask


@pytest.mark.parametrize(
    "setting", ["train.max_steps=9", "train.iterations_per_loop=7", "input.batch_size=64"]
)
def test_settings_of_the_loop_and_the_data_change_no_program(asked, setting):
    assert asked(setting) == asked()


def test_settings_of_decoding_change_that_program_alone(asked):
    before, after = asked(), asked("decode.beam_size=7")
    assert before[:3] == after[:3] and before[3] != after[3]


@pytest.mark.parametrize(
    "setting", ["train.seed=7", "task.encoder.num_layers=6", "optimizer.decay_exponent=0.9"]
)
def test_settings_of_the_model_change_every_program(asked, setting):
    for before, after in zip(asked(), asked(setting), strict=True):
        assert before != after
