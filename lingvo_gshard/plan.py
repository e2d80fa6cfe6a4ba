"""Plans: what a training step would need and cost on a TPU topology that nobody has at hand.

python -m lingvo_gshard.plan --model=m4.MoE2048E36L --topology=v3:32x32 --out=PLAN
python -m lingvo_gshard.plan --table=operators
"""

from __future__ import annotations

import os
import pathlib

from absl import flags

from lingvo_gshard import binary

_TABLES = ("operators",)

_MODEL = flags.DEFINE_string("model", None, "A registered experiment, such as m4.MoE2048E36L.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "Such as v3:32x32, which is 2048 cores.")
_OUT = flags.DEFINE_string("out", None, "The folder for plan.json, report.md and the pictures.")
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens", None, "Target tokens of a batch; the experiment's by default."
)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_TABLE = flags.DEFINE_enum("table", None, _TABLES, "A table of the paper, made here.")

# Those of Table 4 that are compiled for virtual devices.
_NUM_DEVICES = 8


def main(argv: list[str]) -> None:
    del argv
    match _TABLE.value:
        case "operators":
            _print_operators()
        case None:
            _plan()


def _print_operators() -> None:
    # Loaded only now: TensorFlow and JAX read the environment when they are.
    from lingvo_gshard.analysis import operators
    from lingvo_gshard.spmd import topology

    places = operators.OWN_DEVICES
    if topology.is_installed():
        places += operators.TPU_V3
    else:
        print("Without TPUs, which `make setup-tpu` installs the compiler for.")
    print(operators.table(operators.rows(places)))


def _plan() -> None:
    from lingvo_gshard import runs
    from lingvo_gshard.analysis import plan, planner

    settings = tuple(_SET.value)
    params = runs.overridden_params(_MODEL.value, settings)
    made = planner.make(planner.Request(_MODEL.value, settings, params, _TOPOLOGY.value))
    plan.save(made, pathlib.Path(_OUT.value))


def run() -> None:
    """The console entry."""
    # How long a compilation takes is part of a plan.
    os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
    binary.run("plan", main, lambda: _NUM_DEVICES)


if __name__ == "__main__":
    run()
