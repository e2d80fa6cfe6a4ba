"""Flags of the programs that plan registered experiments."""

import contextlib
import pathlib
from typing import TYPE_CHECKING

from absl import flags

from lingvo_gshard import experiment_flags, registry
from xla_plan.plans import plan_folder
from xla_spmd.files import storage

if TYPE_CHECKING:
    from lingvo_gshard.plans.request import Request

_NAMES = "Some of train, initialize, evaluate and decode, or all."

OUT = flags.DEFINE_string("out", None, "The folder for plan.json, report.md and the pictures.")
PROGRAMS = flags.DEFINE_list("programs", None, f"{_NAMES} See the program's help for the default.")
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens", None, "Target tokens of a batch; the experiment's by default."
)
_FROM = flags.DEFINE_string(
    "from", None, "A config.json of transformers, or its folder, in place of --model."
)
flags.adopt_module_key_flags(experiment_flags)


def define_topology() -> flags.FlagHolder[str | None]:
    """Defines --topology."""
    return flags.DEFINE_string(
        "topology",
        None,
        "Such as v3:32x32, which is 2048 cores, or h100:32x8, 32 hosts of 8 GPUs.",
    )


def check(*needed: flags.FlagHolder[str | None]) -> str:
    """Returns the experiment's name, once the flags are right.

    Raises ValueError if --model and --from, --out or one of the `needed` flags is missing, if
    --out cannot be written, if --programs is empty, and for an unknown experiment or setting.
    """
    experiment_flags.read_config()
    _read_from()
    for flag in (experiment_flags.MODEL, *needed, OUT):
        if flag.value is None:
            raise ValueError(f"--{flag.name} is missing; see --help.")
    if PROGRAMS.value == []:
        raise ValueError("--programs is empty; expected some of a run's programs, or all.")

    storage.check_writable(OUT.value or "")
    name = experiment_flags.MODEL.value or ""
    registry.get_params(name, experiment_flags.SET.value)
    return name


def _read_from() -> None:
    """Sets --model, and settings before those of --set, if --from is given.

    Raises ValueError for a missing or damaged file, a model that we do not support, and beside
    --model.
    """
    if _FROM.value is None:
        return
    if experiment_flags.MODEL.value is not None:
        raise ValueError("give --model, or a config.json by --from, not both.")
    from lingvo_gshard.hugging_face import families

    model, settings = families.read(pathlib.Path(_FROM.value)).launched_model()
    flags.FLAGS[experiment_flags.MODEL.name].value = model
    flags.FLAGS[experiment_flags.SET.name].value = [*settings, *experiment_flags.SET.value]


def working() -> contextlib.AbstractContextManager[pathlib.Path]:
    """Returns the context of the local folder of --out, locked against other plans."""
    return plan_folder.working(OUT.value or "")


def request(model: str, topology: str, default: str) -> "Request":
    """Returns the request to plan a model on a topology; `default` is used for --programs.

    Imports neither TensorFlow nor JAX. Raises ValueError for an unknown topology, if the model
    cannot run on it, and for unknown --programs.
    """
    from lingvo_gshard.plans.request import make_request

    made = make_request(model, topology, experiment_flags.SET.value, _BATCH_TOKENS.value)
    names = PROGRAMS.value or [default]
    return made if names == ["all"] else made.only(names)
