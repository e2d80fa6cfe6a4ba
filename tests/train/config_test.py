"""Refused settings of training, specs of a mode, and folders of another model or process."""

import math
import subprocess
import sys

import pytest
import tensorflow as tf

from lingvo_gshard.core.hyperparams import REQUIRED, Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.train import config
from tests.train import regression


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("iterations_per_loop", 0, "train.iterations_per_loop must be 1 or more, got 0"),
        ("save_checkpoints_secs", 0.0, "train.save_checkpoints_secs must be more than 0, got 0.0"),
        ("save_checkpoints_secs", math.nan, "train.save_checkpoints_secs must be finite, got nan"),
        ("keep_checkpoint_max", -1, "train.keep_checkpoint_max must be 1 or more, or None, got -1"),
        ("keep_checkpoint_every_n_hours", 0.0, "every_n_hours must be more than 0, got 0.0"),
        ("seed", 2**31, r"train.seed must be from 0 to 2\*\*31 - 1, got 2147483648"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, message):
    config.check(config.train_params())
    with pytest.raises(ValueError, match=message):
        config.check(config.train_params().Set(**{name: value}))


def test_an_estimator_needs_the_settings_and_checks_them(tmp_path):
    with pytest.raises(ValueError, match="train.seed must be"):
        regression.make(tmp_path, seed=-1)
    params = regression.model_params()
    estimator = regression.make(tmp_path, params=params)
    with pytest.raises(ValueError, match=r"params lack .*Define\(\"train\", config.train_params"):
        type(estimator)(
            regression.model_fn,
            str(tmp_path),
            params=Params(),
            partitioning=estimator.partitioning,
            state_spec=regression.STATE,
            init_fn=regression.init_fn,
        )


def test_a_spec_must_have_the_fields_of_its_mode():
    with pytest.raises(ValueError, match="mode TRAIN needs train_op"):
        TPUEstimatorSpec(Mode.TRAIN, loss=tf.constant(1.0))
    with pytest.raises(ValueError, match="mode EVAL needs eval_metrics"):
        TPUEstimatorSpec(Mode.EVAL, eval_metrics={})
    with pytest.raises(ValueError, match="mode PREDICT needs predictions"):
        TPUEstimatorSpec(Mode.PREDICT)
    TPUEstimatorSpec(Mode.PREDICT, predictions=NestedMap(y=tf.constant(1.0)))


def test_prefixes_are_whole_path_components(tmp_path):
    with config.claimed(tmp_path, "task.dim : 4\ntasks.dim : 5\n", ("task",)):
        pass
    config.check_folder(tmp_path, "task.dim : 4\ntasks.dim : 6\n", ("task",))
    with pytest.raises(ValueError, match=r"tasks.dim: 6, not 5\.$"):
        config.check_folder(tmp_path, "task.dim : 4\ntasks.dim : 6\n", ())
    with pytest.raises(ValueError, match=r"task.dim: absent, not 4\.$"):
        config.check_folder(tmp_path, "tasks.dim : 5\n", ("task",))


def test_the_stages_of_a_pipeline_may_change(tmp_path):
    (tmp_path / "params.txt").write_text("task.dim : 4\n")
    stages = "task.encoder.stages : 2\ntask.encoder.microbatches : 4\n"
    config.check_folder(tmp_path, "task.dim : 4\n" + stages, ("task",))


def test_an_older_run_has_the_defaults_of_new_settings(tmp_path):
    """For Params: a group that was added, and a group that replaced another one."""

    def params(**added):
        task, layer = Params(), Params()
        layer.Define("dim", 4, "")
        layer.Define("biases", False, "")
        layer.Define("kinds", ("a",), "")
        layer.Define("size", REQUIRED, "")
        task.Define("layer", layer, "")
        p = Params()
        p.Define("task", task, "")
        return p.Set(**{"task.layer.dim": 8, "task.layer.size": 3, **added})

    def check(p):
        config.check_folder(tmp_path, p.ToText(), ("task",), p.DefaultsText())

    (tmp_path / "params.txt").write_text("task.layer.dim : 8\ntask.layer.size : 3\n")
    check(params())
    with pytest.raises(ValueError, match=r"differs in task.layer.biases: True, not False\.$"):
        check(params(**{"task.layer.biases": True}))

    # Recorded settings must still be equal, and settings without a default must not be missing.
    (tmp_path / "params.txt").write_text("task.layer.size : 3\n")
    with pytest.raises(ValueError, match=r"differs in task.layer.dim: 8, not 4\.$"):
        check(params())
    (tmp_path / "params.txt").write_text("task.layer.dim : 8\n")
    with pytest.raises(ValueError, match=r"differs in task.layer.size: 3, not absent\.$"):
        check(params())
    (tmp_path / "params.txt").write_text("task.layer : None\ntask.layer.size : 3\n")
    with pytest.raises(ValueError, match=r"task.layer: absent, not None"):
        check(params())


_CLAIMS = """
import sys
from lingvo_gshard.train import config
with config.claimed(sys.argv[1], "task.dim : 4\\n", ("task",)):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_one_process_until_that_ends(tmp_path):
    """The process is killed, and leaves its lock file behind."""
    command = [sys.executable, "-c", _CLAIMS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"claimed\n"
        with (
            pytest.raises(ValueError, match="another process trains in this folder"),
            config.claimed(tmp_path, "task.dim : 4\n", ("task",)),
        ):
            pass
        other.kill()
    with config.claimed(tmp_path, "task.dim : 4\n", ("task",)):
        assert (tmp_path / "train.lock").exists()
