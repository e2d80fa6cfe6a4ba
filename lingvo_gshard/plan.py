"""Plans: what a training step would need and cost on a TPU topology that nobody has at hand.

python -m lingvo_gshard.plan --model=m4.MoE2048E36L --topology=v3:32x32 --out=PLAN
python -m lingvo_gshard.plan --model=m4.MoE128E12L --topology=v3:8x8 --out=SEARCH --search
python -m lingvo_gshard.plan --compare=PLAN_A,PLAN_B
python -m lingvo_gshard.plan --table=operators
python -m lingvo_gshard.plan --table=compile
python -m lingvo_gshard.plan --table=layers
python -m lingvo_gshard.plan --table=scaling --out=FAMILY
"""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

from absl import flags

from lingvo_gshard import cli

if TYPE_CHECKING:
    from lingvo_gshard.planning.planner import Request

_TABLES = ("operators", "compile", "layers", "scaling")

_MODEL = flags.DEFINE_string("model", None, "A registered experiment, such as m4.MoE2048E36L.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "Such as v3:32x32, which is 2048 cores.")
_OUT = flags.DEFINE_string("out", None, "The folder for plan.json, report.md and the pictures.")
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens", None, "Target tokens of a batch; the experiment's by default."
)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_SEARCH = flags.DEFINE_bool("search", False, "Whether to try partitionings and rank them.")
_COMPARE = flags.DEFINE_list("compare", None, "Two or more folders of plans, side by side.")
_TABLE = flags.DEFINE_enum("table", None, _TABLES, "Tables of the paper, made here.")

# Those of Table 4 that are compiled for virtual devices.
_NUM_DEVICES = 8


# What the functions below import loads TensorFlow and JAX, which read the environment then.
def main(argv: list[str]) -> None:
    del argv
    if (_MODEL.value is not None) + bool(_COMPARE.value) + (_TABLE.value is not None) != 1:
        raise ValueError("give one of --model, --compare and --table; see --help.")
    if _COMPARE.value:
        _print_comparison(_COMPARE.value)
    elif _TABLE.value == "operators":
        _print_operators()
    elif _TABLE.value == "compile":
        _print_compile()
    elif _TABLE.value == "layers":
        _print_layers()
    elif _TABLE.value == "scaling":
        _print_scaling(_out())
    elif _SEARCH.value:
        _print_search(*_asked(), _out())
    else:
        _print_plan(*_asked(), _out())


def _print_plan(model: str, topology_name: str, out: pathlib.Path) -> None:
    from lingvo_gshard.planning import plan_report, plan_store, remedies

    request = _request(model, topology_name)
    made = plan_store.planned(request, out)
    print(plan_report.text(made), flush=True)
    if not made.fits:
        print("what would make it fit, each compiled (--search tries partitionings):", flush=True)
        for remedy in remedies.tried(request, out):
            print(remedies.line(remedy), flush=True)


def _print_search(model: str, topology_name: str, out: pathlib.Path) -> None:
    from lingvo_gshard.planning import search
    from lingvo_gshard.spmd import topology

    request = _request(model, topology_name)
    moe = request.params.task.encoder.moe
    num_experts = None if moe is None else moe.num_experts
    tried = search.candidates(num_experts, len(topology.devices(request.topology)))
    print(search.HEAD, flush=True)
    judged = []
    for each in search.search(request, tried, out):
        print(search.line(each), flush=True)
        judged.append(each)
    print("\n" + search.table(judged))


def _print_comparison(folders: list[str]) -> None:
    from lingvo_gshard.planning import plan, plan_comparison

    if len(folders) < 2:
        raise ValueError(f"--compare={folders[0]}: two or more plans are expected.")
    plans = [plan.load(pathlib.Path(folder)) for folder in folders]
    print(plan_comparison.table(plans))


def _print_operators() -> None:
    from lingvo_gshard.planning import operators
    from lingvo_gshard.spmd import topology

    places = operators.OWN_DEVICES
    if topology.is_installed():
        places += operators.TPU_V3
    else:
        print("Without TPUs, which `make setup-tpu` installs the compiler for.")
    print(operators.table(operators.rows(places)))


def _print_compile() -> None:
    from lingvo_gshard.planning import compilation

    sizes = compilation.Sizes()
    print(compilation.table([compilation.measure(count, sizes) for count in compilation.CORES]))


def _print_layers() -> None:
    from lingvo_gshard.planning import depth
    from lingvo_gshard.train import run

    params = run.overridden_params(depth.MODEL, depth.SETTINGS)
    print(depth.table(list(depth.measure(params))))


def _print_scaling(out: pathlib.Path) -> None:
    from lingvo_gshard.planning import paper, plan_store, scaling
    from lingvo_gshard.spmd import topology

    rows = []
    for run in paper.FAMILY:
        made = plan_store.planned(
            _request(run.model, topology.v3(run.cores)), out / run.model.partition(".")[2]
        )
        print(f"{run.name}: {'fits' if made.fits else 'does not fit'}", flush=True)
        rows.append(scaling.Row(run, made))
    print(scaling.text(rows))
    scaling.draw(rows, out)


def _request(model: str, topology_name: str) -> Request:
    """The experiment with the flags' changes, over all cores as the trainer partitions it."""
    from lingvo_gshard.planning.planner import Request
    from lingvo_gshard.spmd import topology
    from lingvo_gshard.train import run

    settings = list(_SET.value)
    if _BATCH_TOKENS.value is not None:
        if any(setting.startswith("input.batch_size=") for setting in settings):
            raise ValueError("give one of --batch_tokens and --set=input.batch_size.")
        length = run.overridden_params(model, tuple(settings)).input.target_len
        if _BATCH_TOKENS.value < 1 or _BATCH_TOKENS.value % length:
            raise ValueError(
                f"--batch_tokens={_BATCH_TOKENS.value}: rows of {length} tokens (input.target_len) "
                "do not make it up; give a multiple."
            )
        settings.append(f"input.batch_size={_BATCH_TOKENS.value // length}")
    params = run.overridden_params(model, tuple(settings))
    cores = len(topology.devices(topology_name))
    parts = run.partitioning_over(params, cores)
    if parts.num_partitions != cores:
        raise ValueError(
            f"--topology={topology_name}: {params.task.encoder.moe.num_experts} experts can't lie "
            f"evenly on its {cores} cores; choose a multiple or a divisor of them."
        )
    return Request(model, tuple(settings), params, topology_name, parts.mesh, parts.table)


def _asked() -> tuple[str, str]:
    """The model and the topology."""
    return _needed("model", _MODEL.value), _needed("topology", _TOPOLOGY.value)


def _out() -> pathlib.Path:
    return pathlib.Path(_needed("out", _OUT.value))


def _needed(name: str, value: str | None) -> str:
    if value is None:
        raise ValueError(f"--{name} is missing; see --help.")
    return value


def run() -> None:
    """The console entry."""
    # How long a compilation takes is part of a plan.
    os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
    cli.run("plan", main, lambda: _NUM_DEVICES)


if __name__ == "__main__":
    run()
