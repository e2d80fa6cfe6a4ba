"""--model, --set and --config, and the programs that list models and settings."""

import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from lingvo_gshard import experiment_flags
from tests import without


@pytest.fixture(autouse=True)
def _flags_are_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text('model = "toy.Dense4L"\n[train]\nmax_steps = 7\nseed = 3\n')
    return str(path)


def test_a_file_gives_settings_that_the_command_line_lacks(config):
    with flagsaver.flagsaver(config=config):
        experiment_flags.read_config()
        assert experiment_flags.MODEL.value == "toy.Dense4L"
        assert experiment_flags.SET.value == ["train.max_steps=7", "train.seed=3"]


def test_flags_win(config):
    with flagsaver.flagsaver(config=config, model="toy.MoE8E4L", set=["train.seed=4"]):
        experiment_flags.read_config()
        assert experiment_flags.MODEL.value == "toy.MoE8E4L"
        assert experiment_flags.SET.value[-2:] == ["train.seed=3", "train.seed=4"]


def test_a_wrong_setting_of_a_file_is_reported_with_the_file(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text('model = "toy.Dense4L"\n[train]\nmax_stps = 7\n')
    message = "^--config=.*/wrong.toml: train.max_stps=7: No hyperparameter 'train.max_stps'"
    with flagsaver.flagsaver(config=str(path)), pytest.raises(ValueError, match=message):
        experiment_flags.read_config()


def _gshard(*args):
    command = without.command(without.SLOW, "lingvo_gshard.gshard", *args)
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_models_and_settings_are_listed_without_anything_slow(config):
    listed = _gshard("models", "toy.d").stdout
    assert listed.startswith("toy.Dense4L  T(4L): 1.94 M weights") and listed.count("\n") == 1
    assert _gshard("settings", "toy.MoE8E4L", "max_steps", "--set=train.max_steps=1e3").stdout == (
        "train.max_steps = 1000\n    int. The step at which training ends.\n"
    )
    toml = _gshard("settings", f"--config={config}", "--toml").stdout
    assert toml.startswith('model = "toy.Dense4L"\n') and "\nmax_steps = 7\n" in toml


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("models", "qqqq"), "no model has 'qqqq' in its name or description"),
        (("settings",), "give a model: gshard settings MODEL; gshard models lists them."),
        (("settings", "toy.MoE8E4L", "qqqq"), "toy.MoE8E4L: no setting has 'qqqq'"),
        (("settings", "toy.MoE8E4L", "steps", "--toml"), "--toml writes all settings: leave steps"),
        (("settings", "--config=/none.toml"), "--config=/none.toml: there is no such file."),
        (("train", "--train.max_steps=10"), "is a setting: write --set=train.max_steps=10; see"),
        (("train", "--batch_size=8"), "`gshard settings MODEL batch_size` finds its path"),
        (
            ("train", "--dat=D"),
            "train: --dat is not a flag of this program (did you mean --data_dir?); see --help.",
        ),
        (
            ("train", "--num=4"),
            "program (did you mean --num_partitions or --num_processes?); see --help.",
        ),
        (("train", "logdir=R", "--logdir=R"), "unexpected logdir=R: a flag begins with --, as in"),
    ],
)
def test_a_mistake_is_reported_in_one_line_with_a_correction(args, message):
    done = _gshard(*args)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


def test_a_program_without_settings_does_not_suggest_them():
    command = [sys.executable, "-m", "lingvo_gshard.compare", "--train.max_steps=10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "--train.max_steps is not a flag of this program" in done.stderr
