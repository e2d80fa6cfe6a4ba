"""Plans: what a run's programs would need and cost on TPUs or GPUs that nobody has at hand.

python -m lingvo_gshard.plan --model=m4.MoE2048E36L --topology=v3:32x32 --out=PLAN
python -m lingvo_gshard.plan --model=m4.MoE128E12L --topology=v3:8x8 --out=SEARCH --search
python -m lingvo_gshard.plan --model=m4.MoE128E12L --topology=h100:16x8 --out=GPUS
python -m lingvo_gshard.plan --model=m4.MoE128E12L --topology=h100:16x8 --out=GPUS --save
python -m lingvo_gshard.plan --model=nllb.MoE54B --topology=h100:1x8 --out=PLAN --programs=decode
python -m lingvo_gshard.plan --program=step.export --topology=v5p:4x4x4 --out=PLAN
python -m lingvo_gshard.plan --program=step.export --topology=v5p:4x4x4 --out=SEARCH --search
python -m lingvo_gshard.plan --compare=PLAN_A,PLAN_B
python -m lingvo_gshard.plan --table=operators    # or compile, layers, capacity
python -m lingvo_gshard.plan --table=sbp --topology=h100:1x8
python -m lingvo_gshard.plan --table=scaling --out=FAMILY --both_readings
python -m lingvo_gshard.plan --table=paper --plans=FAMILY
python -m lingvo_gshard.plan --table=lm --out=LANGUAGE_MODELS
python -m lingvo_gshard.plan --table=published --out=PUBLISHED
python -m lingvo_gshard.plan --table=machines --model=m4.MoE128E12L --out=MACHINES
"""

import contextlib
import functools
import os
import pathlib
from typing import Any

from absl import flags

from lingvo_gshard import cli, registry
from lingvo_gshard.files import lock, storage
from lingvo_gshard.spmd import environment

_MODEL = flags.DEFINE_string("model", None, "A registered experiment, such as m4.MoE2048E36L.")
_PROGRAM = flags.DEFINE_string(
    "program",
    None,
    "Somebody else's program: a file of jax.export, StableHLO (text or bytecode) or HLO (text or a "
    "serialized HloModuleProto).",
)
_MESH = flags.DEFINE_string(
    "mesh", None, "The axes of --program, such as data:16,model:4; its own by default."
)
_ROLE = flags.DEFINE_multi_string(
    "role",
    [],
    "A role of the arguments of --program by name, LABEL=REGEX, such as weights=params; "
    "repeatable.",
)
_CATEGORY = flags.DEFINE_multi_string(
    "category",
    [],
    "A category of the operations of --program by scope, LABEL=REGEX, such as mlp=/mlp/; "
    "repeatable.",
)
_KERNEL_FLOPS = flags.DEFINE_multi_string(
    "kernel_flops",
    [],
    "What a run of a Pallas kernel of --program computes on a device, NAME=FLOPS, if its own "
    "cost_estimate does not say it, such as flash_attention=8.6e9; repeatable.",
)
_LETTERS = flags.DEFINE_multi_string(
    "letters",
    [],
    "Letters of the dims of --program's arguments for --search, REGEX=LETTERS, such as "
    "'.*mlp/wi=M H', where _ is never split; repeatable. Others are proposed.",
)
_AXES = flags.DEFINE_list(
    "axes",
    None,
    "One or two axes of the meshes that --search tries for --program, that of the batch first; its "
    "own by default, or data,model. --mesh fixes their sizes.",
)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Such as v3:32x32, which is 2048 cores, or h100:32x8, 32 hosts of 8 GPUs."
)
_OUT = flags.DEFINE_string("out", None, "The folder for plan.json, report.md and the pictures.")
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens", None, "Target tokens of a batch; the experiment's by default."
)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")
_SEARCH = flags.DEFINE_bool("search", False, "Whether to try partitionings and rank them.")
_SAVE = flags.DEFINE_bool(
    "save", False, "Whether to save OUT/executables for `trainer --executables` if the plan fits."
)
_PROGRAMS = flags.DEFINE_list(
    "programs",
    None,
    "Some of train, initialize, evaluate and decode, or all. All by default, but for "
    "--table=machines, where it is train. --search tries training steps, and plans these programs "
    "for the partitioning that it chooses.",
)
_COMPARE = flags.DEFINE_list("compare", None, "Two or more folders of plans, side by side.")
_TABLE = flags.DEFINE_enum(
    "table",
    None,
    (
        "operators",
        "sbp",
        "compile",
        "layers",
        "capacity",
        "paper",
        "scaling",
        "lm",
        "published",
        "machines",
    ),
    "Tables of the paper, made here; OneFlow's (sbp); the tokens that full experts lose "
    "(capacity); language models beside published rates (lm); all published steps that can be "
    "rebuilt (published); --model on several machines.",
)
_PLANS = flags.DEFINE_string(
    "plans",
    None,
    "A folder that --table=scaling, lm or published has filled: that table, and --table=paper with "
    "scaling's, take the plans there as they are, and compile nothing.",
)
_BOTH_READINGS = flags.DEFINE_bool(
    "both_readings",
    False,
    "Whether --table=scaling also plans a training step on half of the rows: Table 3's batches may "
    "count the tokens of both sides.",
)
_NUM_DEVICES = flags.DEFINE_integer(
    "num_devices", 128, "The devices of each machine of --table=machines, a power of two.", 8
)


def main() -> None:
    """Checks the flags, then computes what they ask for and prints each part once it is known."""
    _check_flags()
    environment.prepare(8)  # The virtual devices that Table 4's operators are compiled for.
    with storage.working(_OUT.value or "") as out, _locked(out):
        if _COMPARE.value:
            _compare()
        elif _TABLE.value:
            _make_table(out)
        elif _PROGRAM.value and _SEARCH.value:
            _search_program(out)
        elif _PROGRAM.value:
            _plan_program(out)
        else:
            _plan_model(out)


def _locked(out: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Locks the folder of --out, if it is given."""
    if _OUT.value is None:
        return contextlib.nullcontext()
    return lock.held(out, "plans in this folder", out / "plan.lock")


def _check_flags() -> None:
    """Raises ValueError for flags that do not go together, and a wrong model or setting."""
    plans_a_model = _MODEL.value is not None and _TABLE.value != "machines"

    plans_a_program = _PROGRAM.value is not None
    kinds = [plans_a_model, plans_a_program, bool(_COMPARE.value), bool(_TABLE.value)]
    if kinds.count(True) != 1:
        raise ValueError(
            "give exactly one of --model, --program, --compare and --table; see --help."
        )
    only_of_programs = (_MESH, _ROLE, _CATEGORY, _KERNEL_FLOPS)
    if not plans_a_program and any(flag.value for flag in only_of_programs):
        raise ValueError("--mesh, --role, --category and --kernel_flops need --program.")
    if _SEARCH.value and not (plans_a_model or plans_a_program):
        raise ValueError("--search needs --model or --program, and excludes --table and --compare.")
    if _SEARCH.value and _KERNEL_FLOPS.value:
        raise ValueError("--kernel_flops is not for --search.")
    if (_LETTERS.value or _AXES.value) and not (plans_a_program and _SEARCH.value):
        raise ValueError("--letters and --axes need --program and --search.")
    if _TOPOLOGY.value and not (plans_a_model or plans_a_program or _TABLE.value == "sbp"):
        raise ValueError("--topology needs --model, --program or --table=sbp.")
    if _SAVE.value and (_SEARCH.value or not plans_a_model):
        raise ValueError("--save needs --model, --topology and --out, and excludes --search.")
    _check_programs()
    if _COMPARE.value and len(_COMPARE.value) < 2:
        raise ValueError(f"--compare={_COMPARE.value[0]}: expected two or more plans, got one.")
    _check_flags_of_tables()

    _check_needed_flags(plans_a_model)

    # Before JAX is imported, so that a wrong name is reported within a second.
    if _MODEL.value is not None:
        registry.get_params(_MODEL.value, _SET.value)


def _check_programs() -> None:
    """Raises ValueError for --programs without a name, or where training steps are compared."""
    names = _PROGRAMS.value
    if names == []:
        raise ValueError("--programs is empty; expected some of a run's programs, or all.")
    if names and _TABLE.value == "machines" and not {"train", "all"} & set(names):
        raise ValueError("--table=machines compares training steps; expected train in --programs.")


def _check_needed_flags(plans_a_model: bool) -> None:
    """Raises ValueError if a flag is missing that the kind of work needs."""
    if _TABLE.value == "machines":
        needed = [_MODEL, _OUT]
    elif plans_a_model or _PROGRAM.value is not None:
        needed = [_TOPOLOGY, _OUT]
    elif _TABLE.value in ("scaling", "lm", "published") and _PLANS.value is None:
        needed = [_OUT]
    else:
        needed = []
    for flag in needed:
        if flag.value is None:
            raise ValueError(f"--{flag.name} is missing; see --help.")


def _check_flags_of_tables() -> None:
    """Raises ValueError for flags that only some tables have."""
    if _PLANS.value and _TABLE.value not in ("paper", "scaling", "lm", "published"):
        raise ValueError(
            "--plans goes with --table=paper, --table=scaling, --table=lm and --table=published."
        )
    if _BOTH_READINGS.value and (_TABLE.value != "scaling" or _PLANS.value):
        raise ValueError("--both_readings goes with --table=scaling, without --plans.")
    if _NUM_DEVICES.value.bit_count() != 1:
        raise ValueError(f"--num_devices={_NUM_DEVICES.value}: expected a power of two.")


def _compare() -> None:
    """Prints the plans of --compare side by side."""
    from lingvo_gshard.planning import plan

    plans = [plan.load(storage.path(folder)) for folder in _COMPARE.value or ()]

    # A folder without a plan has been reported by now, without waiting for what this imports.
    from lingvo_gshard.planning import plan_text

    _tell(plan_text.comparison(plans))


def _make_table(out: pathlib.Path) -> None:
    """Prints the table of --table, compiling what it needs."""
    from lingvo_gshard.planning import commands

    if _PLANS.value or _TABLE.value == "paper":
        _show_table(out if _OUT.value else None)
        return
    match _TABLE.value:
        case "operators":
            commands.compile_operators(_tell)
        case "sbp":
            commands.compile_states(_TOPOLOGY.value, _tell)
        case "compile" | "layers":
            commands.compile_growing(_TABLE.value, _tell)
        case "capacity":
            commands.simulate_capacities(_tell)
        case "scaling":
            commands.plan_family(_request, out, _BOTH_READINGS.value, _tell)
        case "lm":
            commands.plan_language_models(_request, out, _tell)
        case "published":
            commands.plan_published(_request, out, _tell)
        case "machines":
            model = _MODEL.value or ""
            commands.compare_machines(_request, model, _NUM_DEVICES.value, out, _tell)


def _show_table(out: pathlib.Path | None) -> None:
    """Prints a table of plans that are kept in --plans, if any; what is drawn goes into `out`."""
    from lingvo_gshard.planning import commands

    if _PLANS.value is None:
        commands.show_paper(None, out, _tell)
        return
    kept = storage.path(_PLANS.value)
    match _TABLE.value:
        case "paper":
            commands.show_paper(kept, out, _tell)
        case "scaling":
            commands.show_kept_family(kept, out, _tell)
        case "lm":
            commands.show_kept_language_models(kept, _tell)
        case "published":
            commands.show_kept_published(kept, out, _tell)


def _plan_model(out: pathlib.Path) -> None:
    """Prints the plan of --model, or searches for its partitioning."""
    from lingvo_gshard.planning import commands

    request = _request(_MODEL.value or "", _TOPOLOGY.value or "")
    if _SEARCH.value:
        commands.search_partitioning(request, out, _tell)
    else:
        commands.plan_model(request, out, _SAVE.value, _tell)


def _plan_program(out: pathlib.Path) -> None:
    """Prints the plan of --program that is kept in --out, once it is made."""
    with environment.quiet_stderr():  # JAX 0.10 logs that there is no driver.
        from lingvo_gshard.planning import kept_programs, program_text

    plan = kept_programs.load_or_make(
        storage.path(_PROGRAM.value or ""),
        _TOPOLOGY.value or "",
        out,
        mesh=_MESH.value,
        roles=_ROLE.value,
        categories=_CATEGORY.value,
        kernel_flops=_KERNEL_FLOPS.value,
    )
    _tell(program_text.text(plan))


def _search_program(out: pathlib.Path) -> None:
    """Searches for tables that split --program better, and writes what it found into --out."""
    with environment.quiet_stderr():
        from lingvo_gshard.planning import foreign_search
        from lingvo_gshard.planning.compiled import own_process

    request = foreign_search.Request(
        path=storage.path(_PROGRAM.value or ""),
        topology_name=_TOPOLOGY.value or "",
        letters=_LETTERS.value,
        axes=_AXES.value or (),
        mesh=_MESH.value,
        roles=_ROLE.value,
        categories=_CATEGORY.value,
        folder=out,
        progress=functools.partial(print, flush=True),
    )
    # A file that is damaged can make parsers and compilers die.
    _tell("\n" + own_process.call(foreign_search.save_search, request))


def _request(model: str, topology: str) -> Any:
    """Returns the Request for a model on a topology, with the settings and programs of the flags.

    Raises ValueError as make_request.
    """
    from lingvo_gshard.planning.request import make_request

    request = make_request(model, topology, _SET.value, _BATCH_TOKENS.value)

    default = ["train"] if _TABLE.value == "machines" else ["all"]
    names = _PROGRAMS.value or default
    return request if names == ["all"] else request.only(names)


def _tell(text: str) -> None:
    print(text, flush=True)


def run() -> None:
    """The console entry."""
    # The time of a compilation is part of a plan.
    os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
    cli.run("plan", main)


if __name__ == "__main__":
    run()
