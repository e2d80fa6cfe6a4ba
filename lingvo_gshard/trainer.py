"""Trains, evaluates and decodes registered experiments.

    python -m lingvo_gshard.trainer --model=toy.MoE8E4L --data_dir=DATA --logdir=RUN \
        --mode=train_and_eval --num_partitions=4
"""

from __future__ import annotations

from absl import flags

from lingvo_gshard import binary

_MODES = ("train", "eval", "decode", "train_and_eval")

_MODEL = flags.DEFINE_string(
    "model", None, "A registered experiment, such as toy.MoE8E4L.", required=True
)
_LOGDIR = flags.DEFINE_string("logdir", None, "The run's folder.", required=True)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "A folder that data_prep.build prepared.", required=True
)
_MODE = flags.DEFINE_enum("mode", "train_and_eval", _MODES, "What to do.")
_NUM_PARTITIONS = flags.DEFINE_integer("num_partitions", 1, "Devices to split the model over.")
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_SPLIT = flags.DEFINE_enum("split", "test", ["dev", "test"], "What --mode=decode translates.")


def main(argv: list[str]) -> None:
    del argv
    # Loaded only now: TensorFlow and JAX read the environment when they are.
    from lingvo_gshard import modes, runs

    launch = runs.Launch(_MODEL.value, tuple(_SET.value), _DATA_DIR.value)
    facts = runs.data_facts(launch.data_dir)
    params = runs.experiment_params(launch, facts)
    estimator = runs.make_estimator(params, _LOGDIR.value, _NUM_PARTITIONS.value)
    match _MODE.value:
        case "train":
            modes.train(estimator, launch, facts)
        case "train_and_eval":
            modes.train_and_eval(estimator, launch, facts)
        case "eval":
            modes.evaluate(estimator)
        case "decode":
            modes.decode(estimator, _DATA_DIR.value, _SPLIT.value)


def run() -> None:
    """The console entry."""
    binary.run("trainer", main, _NUM_PARTITIONS)


if __name__ == "__main__":
    run()
