"""Trains, evaluates and decodes registered experiments.

    python -m lingvo_gshard.trainer --model=toy.MoE8E4L --data_dir=DATA --logdir=RUN \
        --mode=train_and_eval --num_partitions=4

A folder that holds a run says itself which model and data it is of. SIGTERM or Ctrl-C ends
training after the call under way: it saves and exits with status 75; a second one ends it at once.

Several processes, each with its share of the partitions: the same command in each, with
--coordinator=HOST:PORT --num_processes=N --process_id=0 to N-1, and a --logdir that all can reach.
They watch each other: when one dies, the others say which and exit with status 69. Started again,
all go on.
"""

from __future__ import annotations

import contextlib

from absl import flags

from lingvo_gshard import cli

_MODES = ("train", "eval", "decode", "train_and_eval", "continuous_eval", "export", "report")

_MODEL = flags.DEFINE_string("model", None, "A registered experiment, such as toy.MoE8E4L.")
_LOGDIR = flags.DEFINE_string("logdir", None, "The run's folder.", required=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "A folder that data_prep.build prepared.")
_MODE = flags.DEFINE_enum("mode", "train_and_eval", _MODES, "What to do.")
_NUM_PARTITIONS = flags.DEFINE_integer("num_partitions", 1, "Devices to split the model over.")
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_SPLIT = flags.DEFINE_enum("split", "test", ["dev", "test"], "What --mode=decode translates.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, if several.")
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", 1, "Processes that train together.", lower_bound=1
)
_JOIN_TIMEOUT_SECS = flags.DEFINE_integer(
    "join_timeout_secs", 300, "How long to wait for the others at the start.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "This one's place among them.")


def main(argv: list[str]) -> None:
    del argv
    # Loaded only now: TensorFlow and JAX read the environment when they are.
    from lingvo_gshard.train import modes, run

    if _NUM_PARTITIONS.value % _NUM_PROCESSES.value:
        raise ValueError(
            f"--num_processes={_NUM_PROCESSES.value} does not divide "
            f"--num_partitions={_NUM_PARTITIONS.value}."
        )
    with _joined():
        launch, facts = run.launch_of(
            _MODEL.value, tuple(_SET.value), _DATA_DIR.value, _LOGDIR.value
        )
        params = run.experiment_params(launch, facts)
        estimator = run.make_estimator(params, _LOGDIR.value, _NUM_PARTITIONS.value)
        match _MODE.value:
            case "train":
                modes.train(estimator, launch, facts)
            case "train_and_eval":
                modes.train_and_eval(estimator, launch, facts)
            case "eval":
                modes.evaluate(estimator, facts)
            case "continuous_eval":
                modes.evaluate_continuously(estimator)
            case "decode":
                modes.decode(estimator, launch.data_dir, _SPLIT.value)
            case "export":
                modes.export(estimator)
            case "report":
                modes.report(estimator, launch)


def _joined() -> contextlib.AbstractContextManager[None]:
    """The other processes, if there are any."""
    if _NUM_PROCESSES.value == 1:
        return contextlib.nullcontext()
    from lingvo_gshard.spmd import processes

    if _COORDINATOR.value is None:
        raise ValueError("--num_processes: give --coordinator=HOST:PORT, process 0's, as well.")
    return processes.joined(
        processes.Processes(
            _COORDINATOR.value,
            _NUM_PROCESSES.value,
            _PROCESS_ID.value,
            timeout_secs=_JOIN_TIMEOUT_SECS.value,
        )
    )


def _devices_of_a_process() -> int:
    return _NUM_PARTITIONS.value // _NUM_PROCESSES.value


def run() -> None:
    """The console entry."""
    cli.run("trainer", main, _devices_of_a_process)


if __name__ == "__main__":
    run()
