"""The modes' errors before they compute anything; trainer_test runs the modes."""

import types

import pytest

from lingvo_gshard import registry
from lingvo_gshard.evaluation import decode_split
from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import modes
from lingvo_gshard.runs.launch import Launch
from tests.runs import data_folder

_LAUNCH = Launch("toy.Dense4L", (), "/data", DataFacts(4000, 2000, ("de", "fr")))


@pytest.mark.parametrize(
    "mode",
    [
        modes.train,
        modes.evaluate,
        modes.evaluate_continuously,
        lambda run: decode_split.decode_split(run, "test"),
    ],
)
def test_nothing_is_computed_on_data_of_another_vocabulary(tmp_path, mode):
    launches.record(
        data_folder.prepare(tmp_path / "a", b"ours", b"english", _LAUNCH), str(tmp_path / "run")
    )
    other = data_folder.prepare(tmp_path / "b", b"ours", b"other", _LAUNCH)
    run = types.SimpleNamespace(
        launch=other, logdir=str(tmp_path / "run"), params=registry.get_params("toy.Dense4L")
    )
    with pytest.raises(ValueError, match=r"run/vocab/target.model: .* another vocabulary than"):
        mode(run)


def test_a_learning_rate_that_ends_before_the_training_is_refused():
    settings = ("optimizer.schedule.cool_down_steps=50", "optimizer.schedule.total_steps=200")
    params = registry.get_params("toy.Dense4L", (*settings, "train.max_steps=300"))
    message = r"max_steps is 300, but .* zero at step 200: set optimizer.schedule.total_steps=300"
    with pytest.raises(ValueError, match=message):
        modes.train(types.SimpleNamespace(params=params))


def test_a_table_of_metrics_begins_with_the_loss_and_ends_with_the_layers_and_the_time():
    names = ["aux_loss", "aux_loss_encoder_1", "entropy_decoder_1", "nll", "num_batches"]
    names += ["overflow", "perplexity", "secs", "step"]
    shown = modes.metrics_text({name: float(i) for i, name in enumerate(names)})
    assert [line.split()[0] for line in shown.splitlines()] == [
        "step",
        "nll",
        "perplexity",
        "aux_loss",
        "overflow",
        "aux_loss_encoder_1",
        "entropy_decoder_1",
        "num_batches",
        "secs",
    ]
