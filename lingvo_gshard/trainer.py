"""Trains, evaluates and decodes registered experiments.

    gshard train --model=toy.MoE8E4L --data_dir=DATA --logdir=RUN \\
        --mode=train_and_eval --num_partitions=4

A folder that holds a run knows its model and data, so later commands need --logdir alone. SIGTERM
or Ctrl-C stops training after the call under way, saves, and exits with status 75; a second one
ends the process at once.

To train with several processes, give each the same command and a --logdir that all can reach, with
--cluster=auto under Slurm, Open MPI, Kubernetes or Cloud TPU, else with --coordinator=HOST:PORT,
--num_processes=N, and its own --process_id from 0 to N-1. If one dies, the others name it and exit
with status 69; started again, all of them continue.
"""

from __future__ import annotations

import re
import shlex

from absl import flags

from lingvo_gshard import cli, experiment_flags
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import opening
from xla_spmd.files import storage
from xla_spmd.runtime import environment

_MODES = ("train", "eval", "decode", "train_and_eval", "continuous_eval", "export", "report")
# The inputs whose files are checked before the devices start, by mode.
_INPUTS = {
    "train": ["input"],
    "train_and_eval": ["input", "eval_input"],
    "continuous_eval": ["eval_input"],
}

_LOGDIR = flags.DEFINE_string("logdir", None, "The run's folder.", required=True)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "A folder that `gshard prepare` wrote.")
_MODE = flags.DEFINE_enum("mode", "train_and_eval", _MODES, "What to do.")
_EXECUTABLES = flags.DEFINE_string(
    "executables", None, "A folder of executables of `plan model --save`."
)
_VERIFY_DATA = flags.DEFINE_bool("verify_data", False, "First check the hashes of all the data.")
_SPLIT = flags.DEFINE_string(
    "split", None, "What --mode=decode translates (test) and --mode=eval evaluates (dev)."
)
_PROFILE_STEPS = flags.DEFINE_string(
    "profile_steps", None, "A:B traces the steps after A, to B, and prints their time by category."
)
cli.define_devices()
flags.adopt_module_key_flags(cli)
flags.adopt_module_key_flags(experiment_flags)


def main() -> None:
    """Does what --mode says; raises ValueError for a user's mistake."""
    profiled = _profiled()
    if profiled is not None:
        environment.prepare_profiling()
    if _SPLIT.value is not None and _MODE.value not in ("decode", "eval"):
        raise ValueError(f"--split needs --mode=decode or eval, not --mode={_MODE.value}.")

    experiment_flags.read_config()
    opened = opening.to_train(
        experiment_flags.MODEL.value,
        tuple(experiment_flags.SET.value),
        _DATA_DIR.value,
        _LOGDIR.value,
        cli.start_devices,
        check=_check,
        trains=_MODE.value in ("train", "train_and_eval"),
        executables=_EXECUTABLES.value,
    )
    with cli.joined(), opened as (run, devices):
        from lingvo_gshard.runs import modes

        modes.print_once(f"{devices}, {run.computing}")
        if _VERIFY_DATA.value:
            modes.verify_data(run)

        hooks = []
        if profiled is not None:
            from lingvo_gshard.plans import profile

            hooks = profile.hooks(run, *profiled)

        match _MODE.value:
            case "train":
                modes.train(run, hooks)
                modes.print_once(modes.next_commands(run, str(_LOGDIR.value)))
            case "train_and_eval":
                modes.train_and_eval(run, hooks)
                modes.print_once(modes.next_commands(run, str(_LOGDIR.value)))
            case "eval":
                modes.evaluate(run, _split())
            case "continuous_eval":
                modes.evaluate_continuously(run)
            case "export":
                modes.export(run)
            case "decode":
                from lingvo_gshard.evaluation import decode_split

                decode_split.decode_split(run, _split())
                command = f"gshard train --logdir={shlex.quote(str(_LOGDIR.value))} --mode=report"
                modes.print_once(f"Next: {command}")
            case "report":
                from lingvo_gshard.evaluation import run_report

                path = run_report.report(run)
                modes.print_once(f"Wrote {storage.origin(path)}.")


def _split() -> str:
    """Returns the split of --mode=decode or --mode=eval."""
    return _SPLIT.value or ("test" if _MODE.value == "decode" else "dev")


def _check(launch: launches.Launch, folder: str) -> None:
    """Raises ValueError for what --mode lacks, as far as it is known before the devices start."""
    inputs = _INPUTS.get(_MODE.value, [])
    launches.check_sizes(launch, inputs, flags.FLAGS.num_partitions)
    match _MODE.value:
        case "train" | "train_and_eval":
            launches.check_to_train(launch, folder, evaluates=_MODE.value == "train_and_eval")
        case "continuous_eval":
            launches.check_folder(launch, folder)
            launches.check_data(launch, folder)
        case "decode":
            launches.check_to_decode(launch, folder, _split())
        case "eval":
            launches.check_to_evaluate(launch, folder, _split())
        case "export":
            launches.check_weights(launch, folder)
        case "report":
            launches.check_folder(launch, folder)

    # Several processes share this work when they open the input.
    if cli.processes() is None:
        launches.check_files(launch, inputs)


def _profiled() -> tuple[int, int] | None:
    """Returns A and B of --profile_steps, or None without it; ValueError if it is not A:B."""
    if _PROFILE_STEPS.value is None:
        return None
    if _MODE.value not in ("train", "train_and_eval"):
        raise ValueError(f"--profile_steps needs a mode that trains, not --mode={_MODE.value}.")

    steps = re.fullmatch(r"(\d+):(\d+)", _PROFILE_STEPS.value)
    if steps is None or int(steps[1]) >= int(steps[2]):
        raise ValueError(
            f"--profile_steps={_PROFILE_STEPS.value}: expected A:B, two steps, A before B."
        )
    return int(steps[1]), int(steps[2])


if __name__ == "__main__":
    cli.run("trainer", main)
