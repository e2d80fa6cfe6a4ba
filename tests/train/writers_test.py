"""Weights & Biases and MLflow beside TensorBoard: modules that record the calls of their APIs."""

import importlib.machinery
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lingvo_gshard.train.estimator import EvalSpec
from lingvo_gshard.train.train_and_evaluate import train_and_evaluate
from tests.train import regression

_DEV = EvalSpec(lambda p: regression.Batches(num_batches=1), name="dev", best_by="error")


def _module(monkeypatch, name):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def wandb(monkeypatch):
    """wandb.init(...) -> run, with log, define_metric and finish."""
    module = _module(monkeypatch, "wandb")
    module.calls = []

    class Run:
        def __init__(self, run_id):
            self.id = run_id

        def define_metric(self, name, step_metric=None):
            module.calls.append(("define_metric", name, step_metric))

        def log(self, data):
            module.calls.append(("log", data))

        def finish(self):
            module.calls.append(("finish",))

    def init(*, dir, name, id, resume, config):
        module.calls.append(("init", name, id, resume, config))
        return Run(id or "a1b2")

    module.init = init
    return module


@pytest.fixture
def mlflow(monkeypatch):
    """mlflow.start_run(...) -> run, log_metrics, log_text and end_run."""
    module = _module(monkeypatch, "mlflow")
    module.calls = []

    def start_run(run_id=None, run_name=None):
        module.calls.append(("start_run", run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "c3d4"))

    module.start_run = start_run
    module.log_text = lambda text, file: module.calls.append(("log_text", text, file))
    module.log_metrics = lambda metrics, step: module.calls.append(("log_metrics", metrics, step))
    module.end_run = lambda: module.calls.append(("end_run",))
    return module


def _train(folder, writers, max_steps):
    estimator = regression.make(folder, save_checkpoints_steps=2, writers=writers)
    train_and_evaluate(estimator, lambda p: regression.Batches(), _DEV, max_steps=max_steps)
    return estimator


@pytest.mark.slow
def test_all_get_the_same_numbers_and_later_starts_continue(tmp_path, wandb, mlflow):
    folder = tmp_path / "run"
    estimator = _train(folder, "tensorboard,wandb,mlflow", 2)
    assert [call[0] for call in wandb.calls] == [
        "init",
        "define_metric",
        "log",
        "log",
        "log",
        "finish",
    ]
    _, name, run_id, resume, config = wandb.calls[0]
    assert (name, run_id, resume) == ("run", None, "allow")
    assert config["train.save_checkpoints_steps"] == "2"
    assert wandb.calls[1] == ("define_metric", "*", "step")

    first = wandb.calls[2][1]
    assert first["step"] == 1 and first["train/loss"] > 0 and "train/mean_V/2" in first
    evaluation = wandb.calls[4][1]
    assert evaluation["step"] == 2 and evaluation["eval_dev/error"] > 0

    names = ["start_run", "log_text", "log_metrics", "log_metrics", "log_metrics", "end_run"]
    assert [call[0] for call in mlflow.calls] == names
    assert mlflow.calls[1][1:] == (estimator.params.ToText(), "params.txt")
    for ours, theirs in zip(mlflow.calls[2:5], wandb.calls[2:5], strict=True):
        _, metrics, step = ours
        assert {**metrics, "step": step} == theirs[1]

    events = EventAccumulator(str(folder / "train"))
    events.Reload()
    assert events.Scalars("loss")[0].value == pytest.approx(first["train/loss"])

    # Another start continues the runs, and so does an evaluation alone.
    _train(folder, "wandb,mlflow", 4)
    estimator.evaluate(_DEV.input_fn, name="whole_dev")
    inits = [call for call in wandb.calls if call[0] == "init"]
    assert [call[2] for call in inits] == [None, "a1b2", "a1b2"]
    starts = [call[1] for call in mlflow.calls if call[0] == "start_run"]
    assert starts == [None, "c3d4", "c3d4"]
    assert wandb.calls[-2][1]["eval_whole_dev/error"] > 0 and wandb.calls[-1] == ("finish",)


def test_a_package_is_needed_only_if_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # As if it were not installed.
    regression.make(tmp_path)
    with pytest.raises(
        ValueError, match=r"train.writers=wandb: the package wandb is not installed"
    ):
        regression.make(tmp_path, writers="wandb")
    expected = "train.writers=tensorbored: 'tensorbored' is not one of tensorboard, wandb, mlflow"
    with pytest.raises(ValueError, match=expected):
        regression.make(tmp_path, writers="tensorbored")
