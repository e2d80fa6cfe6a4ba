"""Trains, evaluates and decodes registered experiments.

    python -m lingvo_gshard.trainer --model=toy.MoE8E4L --data_dir=DATA --logdir=RUN \\
        --mode=train_and_eval --num_partitions=4

A folder that holds a run knows its model and data, so later commands need --logdir alone. SIGTERM
or Ctrl-C stops training after the call under way, saves, and exits with status 75; a second one
ends the process at once.

To train with several processes, give each the same command and a --logdir that all can reach, with
--cluster=auto under Slurm, Open MPI, Kubernetes or Cloud TPU, else with --coordinator=HOST:PORT,
--num_processes=N, and its own --process_id from 0 to N-1. If one dies, the others name it and exit
with status 69; started again, all of them continue.
"""

import contextlib
import functools
from typing import Any

from absl import flags

from lingvo_gshard import cli

_MODES = ("train", "eval", "decode", "train_and_eval", "continuous_eval", "export", "report")

_MODEL = flags.DEFINE_string("model", None, "A registered experiment, such as toy.MoE8E4L.")
_LOGDIR = flags.DEFINE_string("logdir", None, "The run's folder.", required=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "A folder that data_prep.build prepared.")
_MODE = flags.DEFINE_enum("mode", "train_and_eval", _MODES, "What to do.")
_DEVICES = cli.device_flags()
_EXECUTABLES = flags.DEFINE_string(
    "executables", None, "A folder that `plan --save` wrote: train with it instead of compiling."
)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_VERIFY_DATA = flags.DEFINE_bool("verify_data", False, "First check the hashes of all the data.")
_SPLIT = flags.DEFINE_enum("split", "test", ["dev", "test"], "The split that is decoded.")
_CLUSTER = flags.DEFINE_enum(
    "cluster", "none", ["auto", "none"], "auto: what Slurm, Open MPI, Kubernetes or Cloud TPU say."
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, if several.")
_COORDINATOR_PORT = flags.DEFINE_integer(
    "coordinator_port", None, "The port of process 0, with --cluster=auto.", 1, 65535
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", 1, "Processes that train together.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer("process_id", 0, "This process's number among them.")
_JOIN_TIMEOUT_SECS = flags.DEFINE_integer(
    "join_timeout_secs", 300, "Seconds to wait for the other processes at the start.", lower_bound=1
)


def main(argv: list[str]) -> None:
    del argv
    runs, modes = cli.load("lingvo_gshard.train.run"), cli.load("lingvo_gshard.train.modes")
    with _joined():
        asked = _MODEL.value, tuple(_SET.value), _DATA_DIR.value
        launch = runs.launch_of(*asked, _LOGDIR.value)
        num_partitions, devices = _DEVICES.start(launch.model)
        modes.print_once(devices)
        run = runs.open_run(launch, _LOGDIR.value, num_partitions, _EXECUTABLES.value)
        if _VERIFY_DATA.value:
            modes.verify_data(run)
        match _MODE.value:
            case "train":
                modes.train(run)
            case "train_and_eval":
                modes.train_and_eval(run)
            case "eval":
                modes.evaluate(run)
            case "continuous_eval":
                modes.evaluate_continuously(run)
            case "export":
                modes.export(run)
            case "decode":
                cli.load("lingvo_gshard.evaluation.decode_split").decode_split(run, _SPLIT.value)
            case "report":
                path = cli.load("lingvo_gshard.evaluation.run_report").report(run)
                modes.print_once(f"Wrote {path}.")


def _joined() -> contextlib.AbstractContextManager[None]:
    """Joins the other processes, if there are any."""
    if (processes := _processes()) is None:
        return contextlib.nullcontext()
    return cli.load("lingvo_gshard.spmd.processes").joined(processes)


@functools.cache
def _processes() -> Any:
    """The Processes that train together; None if this one trains alone."""
    spmd, timeout_secs = cli.load("lingvo_gshard.spmd.processes"), _JOIN_TIMEOUT_SECS.value
    explicit = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    if _CLUSTER.value == "auto":
        if explicit != (None, 1, 0):
            raise ValueError("--cluster=auto asks the cluster; give no --coordinator besides.")
        found = spmd.detected(_COORDINATOR_PORT.value, timeout_secs)
        return found if found.num_processes > 1 else None
    if _NUM_PROCESSES.value == 1:
        return None
    if _COORDINATOR.value is None:
        raise ValueError("--num_processes: give --coordinator=HOST:PORT of process 0 as well.")
    return spmd.Processes(*explicit, timeout_secs=timeout_secs)


def _num_devices() -> int:
    """The CPU devices of each process."""
    processes = _processes()
    count = processes.num_processes if processes else 1
    partitions = _DEVICES.num_partitions.value or count
    if partitions % count:
        raise ValueError(
            f"{count} processes need --num_partitions of {count} or a multiple, got {partitions}."
        )
    return partitions // count


def run() -> None:
    """The console entry."""
    cli.run("trainer", main, _num_devices)


if __name__ == "__main__":
    run()
