"""Tables and figures of the paper, and of other publications, made here from plans.

python -m repro.plan_tables --table=operators    # or compile, layers, mpmd, capacity
python -m repro.plan_tables --table=sbp --topology=h100:1x8
python -m repro.plan_tables --table=scaling --out=FAMILY --both_readings
python -m repro.plan_tables --table=paper --plans=FAMILY
python -m repro.plan_tables --table=lm --out=LANGUAGE_MODELS
python -m repro.plan_tables --table=published --out=PUBLISHED
"""

import contextlib
import functools
import os
import pathlib

from absl import flags

from lingvo_gshard import cli
from xla_spmd.files import lock, storage
from xla_spmd.runtime import environment

_TABLE = flags.DEFINE_enum(
    "table",
    None,
    [
        "operators",
        "sbp",
        "compile",
        "layers",
        "mpmd",
        "capacity",
        "paper",
        "scaling",
        "lm",
        "published",
    ],
    "The paper's operators, compile times and family (operators, compile, layers, mpmd, scaling, "
    "paper); OneFlow's tables (sbp); the tokens that full experts drop (capacity); language models "
    "beside published rates (lm); all published steps that can be rebuilt (published).",
)
_OUT = flags.DEFINE_string("out", None, "The folder for plans and pictures.")
_PLANS = flags.DEFINE_string(
    "plans",
    None,
    "A folder that --table=scaling, lm or published has filled. The table then takes its plans "
    "from there and compiles nothing; --table=paper takes the plans of --table=scaling.",
)
_TOPOLOGY = flags.DEFINE_string("topology", None, "A second topology for --table=sbp: h100:1x8.")
_BOTH_READINGS = flags.DEFINE_bool(
    "both_readings",
    False,
    "Whether --table=scaling also plans a training step on half of the rows: Table 3's batches may "
    "count the tokens of both sides.",
)
_PROGRAMS = flags.DEFINE_list(
    "programs", ["all"], "Some of train, initialize, evaluate and decode, or all, for --table=lm."
)

_FROM_PLANS = ("paper", "scaling", "lm", "published")


def main() -> None:
    """Prints the table, and compiles the programs that it needs."""
    _check_flags()
    # Virtual devices: as many as Figure 2's largest program needs, or Table 4's operators.
    environment.prepare(64 if _TABLE.value == "mpmd" else 8)
    tell = functools.partial(print, flush=True)
    with storage.working(_OUT.value or "") as out, _locked(out):
        if _PLANS.value or _TABLE.value == "paper":
            _show(out if _OUT.value else None)
            return

        from lingvo_gshard.plans.request import Request, make_request
        from repro.tables import commands

        def ask(model: str, topology: str) -> Request:
            made = make_request(model, topology, [], None)
            return made if _PROGRAMS.value == ["all"] else made.only(_PROGRAMS.value)

        match _TABLE.value:
            case "operators":
                commands.compile_operators(tell)
            case "sbp":
                commands.compile_states(_TOPOLOGY.value, tell)
            case "compile" | "layers":
                commands.compile_growing(_TABLE.value, tell)
            case "mpmd":
                commands.compile_each_device(tell)
            case "capacity":
                commands.simulate_capacities(tell)
            case "scaling":
                commands.plan_family(ask, out, _BOTH_READINGS.value, tell)
            case "lm":
                commands.plan_language_models(ask, out, tell)
            case "published":
                commands.plan_published(ask, out, tell)


def _locked(out: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Locks the folder of --out, if it is given."""
    if _OUT.value is None:
        return contextlib.nullcontext()
    return lock.held(out, "plans in this folder", out / "plan.lock")


def _check_flags() -> None:
    """Raises ValueError for flags that exclude each other, and for missing flags."""
    table = _TABLE.value
    if table is None:
        raise ValueError("--table is missing; see --help.")
    if _PLANS.value and table not in _FROM_PLANS:
        raise ValueError(f"--plans is for --table={', '.join(_FROM_PLANS)}, not for {table}.")
    if _TOPOLOGY.value and table != "sbp":
        raise ValueError(f"--topology is for --table=sbp, not for {table}.")
    if _BOTH_READINGS.value and (table != "scaling" or _PLANS.value):
        raise ValueError("--both_readings is for --table=scaling without --plans.")
    if table in ("scaling", "lm", "published") and not _PLANS.value and not _OUT.value:
        raise ValueError("--out is missing; see --help.")


def _show(out: pathlib.Path | None) -> None:
    """Prints a table of the plans in --plans, if any, and draws its pictures into `out`."""
    from repro.tables import commands

    tell = functools.partial(print, flush=True)
    if _PLANS.value is None:
        commands.show_paper(None, out, tell)
        return
    kept = storage.path(_PLANS.value)
    match _TABLE.value:
        case "paper":
            commands.show_paper(kept, out, tell)
        case "scaling":
            commands.show_kept_family(kept, out, tell)
        case "lm":
            commands.show_kept_language_models(kept, tell)
        case "published":
            commands.show_kept_published(kept, out, tell)


def run() -> None:
    """The console entry."""
    # The time of a compilation belongs to a plan.
    os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
    cli.run("plan_tables", main)


if __name__ == "__main__":
    run()
