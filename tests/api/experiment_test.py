"""Experiments as objects: checks at once, and, slowly, the way from training to a bundle."""

import subprocess
import sys
import textwrap

import pytest

import lingvo_gshard as gshard
from lingvo_gshard.api import experiment, results
from lingvo_gshard.core import hyperparams, settings
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.train.hooks import EXIT_STATUS
from tests.docs import scripts


def test_the_models_are_named_and_their_settings_are_there():
    assert "toy.MoE8E4L" in gshard.models()
    made = gshard.experiment(
        "toy.MoE8E4L", settings={"train.max_steps": 7, "task.encoder.moe.dispatch": Dispatch.EINSUM}
    )
    assert made.params.train.max_steps == 7
    assert made.params.task.encoder.moe.dispatch is Dispatch.EINSUM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "toy.MoE8E"}, "No model 'toy.MoE8E'. Did you mean toy.MoE8E"),
        ({}, "give the name of a model, or the logdir of a run"),
        (
            {"settings": {"train.max_step": 7}},
            "No hyperparameter 'train.max_step'; did you mean train.max_steps",
        ),
        ({"settings": ["train.max_steps=7"]}, "settings: expected a dict such as"),
        ({"data_dir": "/none"}, "no data folder /none: prepare it with"),
        ({"data_dir": 3}, "data_dir: expected a str or a pathlib.Path, got int 3"),
        ({"platform": "gpu"}, "platform='gpu': expected one of auto, cpu, cuda, tpu"),
    ],
)
def test_a_mistake_is_a_value_error_at_once(arguments, message):
    model = {"model": "toy.MoE8E4L"} if arguments else {}
    with pytest.raises(ValueError, match=message):
        gshard.experiment(**{**model, **arguments})


def test_training_needs_a_folder():
    with pytest.raises(ValueError, match="logdir, the folder of the run, is missing"):
        gshard.experiment("toy.MoE8E4L").train()


def test_wrong_hooks_are_refused_before_anything_starts():
    with pytest.raises(
        ValueError, match="train: hooks: expected a list of TrainHooks, got builtin"
    ):
        gshard.experiment("toy.MoE8E4L").train(hooks=print)


def test_lines_that_are_no_text_are_refused_before_the_weights_are_read():
    with pytest.raises(ValueError, match="line 2: expected a str, got int 1"):
        gshard.experiment("toy.MoE8E4L", logdir="/none").translate(["a", 1])


@pytest.mark.parametrize("value", [3, 0.5, None, True, (1, 2), "8", "d:*", "a'b", [0, 1], "None"])
def test_a_setting_is_read_as_it_was_given(value):
    (text,) = settings.as_texts({"a.b": value})
    assert hyperparams.parse_setting(text) == ("a.b", value)


def test_making_one_loads_neither_jax_nor_tensorflow():
    code = """
        import sys
        import lingvo_gshard as gshard
        gshard.experiment("toy.MoE8E4L", settings={"train.max_steps": 7})
        print([name for name in ("jax", "tensorflow", "matplotlib") if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_a_training_that_a_signal_stopped_ends_as_a_cell_does():
    with pytest.raises(KeyboardInterrupt, match=r"train\(\) continues it"):
        with experiment._interrupts():
            sys.exit(EXIT_STATUS)
    with pytest.raises(SystemExit), experiment._interrupts():
        sys.exit(3)


def test_results_are_shown_as_text_and_as_html(tmp_path):
    (tmp_path / "train_metrics.jsonl").write_text(
        '{"step": 2, "metrics": {"loss": 3.5}}\n{"step": 4, "metrics": {"loss": 2.5}}\n'
    )
    trained = results.Training(str(tmp_path), 4, {"nll": 2.25, "step": 4.0})
    assert str(trained).splitlines()[1].split() == ["nll", "2.25"]
    assert "<td>2.25" in trained._repr_html_() and "data:image/png" in trained._repr_html_()
    assert [line["step"] for line in trained.lines()] == [2, 4]

    report = results.PlanReport(None, "a < b")
    assert (str(report), report._repr_html_()) == ("a < b", "<pre>a &lt; b</pre>")


_SCRIPT = """
import lingvo_gshard as gshard
from tests import trainer_test

settings = dict(setting.split("=") for setting in trainer_test._SMALL)
settings = {path: int(value) for path, value in settings.items()}
experiment = gshard.experiment(
    "toy.MoE8E4L", data_dir=DATA, logdir="RUN", settings=settings, platform="cpu", num_partitions=2
)
print("trained", experiment.train().step)
print("evaluated", sorted(experiment.evaluate("test").parts))
print("scored", [language.code for language in experiment.decode().by_size()])
lines = ["ba ke", "mo"]
text = experiment.translate(lines)
assert isinstance(experiment.translate("ba ke"), str)
bundle = gshard.load(experiment.export("BUNDLE"))
run = gshard.load("RUN")
assert text == bundle.translate(lines) == run.translate(lines)
again = gshard.experiment(logdir="RUN", settings={"train.max_steps": 6})
print("continued", again.train(evaluate=False).step)
try:
    gshard.experiment(logdir="RUN", num_partitions=4).evaluate()
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_an_unguarded_script_goes_from_data_to_a_bundle(tmp_path):
    from tests import trainer_test

    data_dir = trainer_test.prepare(tmp_path / "corpus")
    printed = scripts.output(f"DATA = {data_dir!r}\n{_SCRIPT}", tmp_path)
    for line in ("trained 4", "evaluated ['aa', 'br']", "scored ['aa', 'br']", "continued 6"):
        assert printed.count(f"{line}\n") == 1, printed
    assert "num_partitions=4: JAX has started in this process already, with fewer" in printed
