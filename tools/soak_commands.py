"""Kills every command at random moments, and compares the final results.

    python -m tools.soak_commands --text=TEXT_DIR --documents=DOCUMENTS_DIR --out=OUT --kills=200

The commands prepare a small corpus; train, evaluate, decode, prune and export a small model;
translate a file; do the same with a small language model, which continues prompts; import a
pretrained model; and plan a program. Each command runs twice undisturbed. Then it is killed with
its children by SIGKILL at random moments within its usual time, and started again. If it ends
before its kill, it must succeed, and starts from the beginning for the next kill. A complete
checkpoint must never be lost, and the final results must equal the undisturbed ones bit for bit;
otherwise, the exit status is 1. After an interruption, the same command continues the test. With
--only, the inputs of the named commands must exist already.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from lingvo_gshard.input import manifest
from lingvo_gshard.train import metrics_files
from tools.disturbed_run import Run
from xla_spmd.files import atomic_file, table

_TEXT = flags.DEFINE_string("text", None, "A small folder of parallel text.", required=True)
_DOCUMENTS = flags.DEFINE_string("documents", None, "A small folder of documents.", required=True)
_FOLDER = flags.DEFINE_string("out", None, "A folder for all results.", required=True)
_NUM_KILLS = flags.DEFINE_integer("kills", 200, "Kills of all commands together.", lower_bound=0)
_ONLY = flags.DEFINE_list("only", [], "The names of the commands; by default, all commands.")
_SOAK_SEED = flags.DEFINE_integer("seed", 1, "The seed of the random moments.")

_ROOT = pathlib.Path(__file__).parent.parent
_PRETRAINED = _ROOT / "tests/hugging_face/models/nllb_moe_bin"
# A product of matrices on the eight cores of TPU v3, as XLA writes it.
_PROGRAM = """HloModule soak, num_partitions=8
ENTRY main {
  x = f32[64,32] parameter(0), sharding={devices=[8,1]<=[8]}
  w = f32[32,16] parameter(1), sharding={replicated}
  ROOT dot = f32[64,16] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
_SETTINGS = (
    "task.dim=64",
    "task.encoder.moe.group_size=64",
    "task.decoder.moe.group_size=64",
    "input.batch_size=16",
    "input.source_len=64",
    "input.target_len=64",
    "eval_input.batch_size=16",
    "eval_input.source_len=64",
    "eval_input.target_len=64",
    "train.max_steps=40",
    "train.iterations_per_loop=2",
    "train.save_checkpoints_steps=4",
    "decode.batch_size=16",
    "decode.max_source_len=64",
    "decode.max_target_len=64",
    "decode.max_sentences=64",
)
_LM_SETTINGS = (
    "task.dim=64",
    "task.decoder.moe.group_size=64",
    "input.batch_size=8",
    "input.row_len=64",
    "eval_input.batch_size=8",
    "eval_input.row_len=64",
    "train.max_steps=20",
    "train.iterations_per_loop=2",
    "train.save_checkpoints_steps=4",
    "decode.batch_size=8",
    "decode.prompt_len=8",
    "decode.max_prompt_len=16",
    "decode.max_target_len=16",
    "decode.max_sentences=32",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command. `made` are its output files, which are deleted before it starts anew."""

    name: str
    module: str
    flags: Callable[[pathlib.Path], list[str]]
    made: tuple[str, ...]
    result: Callable[[pathlib.Path], Any]  # Returns the result that must be equal, as JSON.


@dataclasses.dataclass
class Progress:
    """For each stage: its kills so far, its runs that ended before their kill, its usual time."""

    path: pathlib.Path
    kills: dict[str, int] = dataclasses.field(default_factory=dict)
    ended: dict[str, int] = dataclasses.field(default_factory=dict)
    secs: dict[str, float] = dataclasses.field(default_factory=dict)

    def read(self) -> "Progress":
        """Returns the progress that an earlier process wrote, or this one."""
        found = json.loads(self.path.read_bytes()) if self.path.exists() else {}
        return dataclasses.replace(self, **found)

    def write(self) -> None:
        """Writes all fields except for the path."""
        fields = {name: value for name, value in vars(self).items() if name != "path"}
        atomic_file.write(self.path, json.dumps(fields))


# --- The results that must be equal ---


def _hashes(*patterns: str) -> Callable[[pathlib.Path], Any]:
    """Returns a function from a command's folder to the digests of the files that it made."""

    def hashes(folder: pathlib.Path) -> Any:
        paths: set[pathlib.Path] = set()
        for pattern in patterns:
            paths.update(folder.glob(pattern))
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(paths)
            if path.is_file()
        }

    return hashes


def _run_in(name: str) -> Callable[[pathlib.Path], Any]:
    """Returns a function that returns a run's weights, its losses and its damaged files."""

    def result(folder: pathlib.Path) -> Any:
        run = Run(folder / name)
        return [run.fingerprints(), sorted(run.losses().items()), run.num_damaged()]

    return result


def _evaluation(folder: pathlib.Path) -> Any:
    *_, last = metrics_files.read_lines(folder / "run/eval_metrics.jsonl")
    return {name: value for name, value in last.items() if name != "secs"}


def _plan(folder: pathlib.Path) -> Any:
    values = json.loads((folder / "plan/plan.json").read_bytes())
    # The times of lowering and compiling differ, and the digest covers them.
    for name in ("lower_secs", "compile_secs", "compile_cpu_secs", "digest"):
        del values[name]
    return values


# --- The flags of each command ---


def _trainer(mode: str, run: str = "run") -> Callable[[pathlib.Path], list[str]]:
    devices = ["--platform=cpu", "--num_partitions=2"]
    return lambda folder: [f"--mode={mode}", f"--logdir={folder / run}", *devices]


def _train(folder: pathlib.Path) -> list[str]:
    model = ["--model=toy.MoE8E4L", f"--data_dir={folder / 'data'}"]
    settings = [f"--set={setting}" for setting in _SETTINGS]
    return [*_trainer("train")(folder), *model, *settings]


def _train_lm(folder: pathlib.Path) -> list[str]:
    model = ["--model=toy.LmMoE8E4L", f"--data_dir={folder / 'lm_data'}"]
    settings = [f"--set={setting}" for setting in _LM_SETTINGS]
    return [*_trainer("train", "lm_run")(folder), *model, *settings]


def _prepare(folder: pathlib.Path) -> list[str]:
    sizes = ["--source_vocab_size=600", "--target_vocab_size=600", "--workers=2"]
    return [f"--input={os.path.abspath(_TEXT.value)}", f"--out={folder / 'data'}", *sizes]


def _prepare_lm(folder: pathlib.Path) -> list[str]:
    text = ["--kind=text", f"--input={os.path.abspath(_DOCUMENTS.value)}"]
    return [*text, f"--out={folder / 'lm_data'}", "--text_vocab_size=600", "--workers=2"]


def _export(target: str, run: str = "run") -> Callable[[pathlib.Path], list[str]]:
    def export_flags(folder: pathlib.Path) -> list[str]:
        flag = "export_saved_model" if target == "saved_model" else "bundle"
        return [f"--logdir={folder / run}", f"--{flag}={folder / target}", "--platform=cpu"]

    return export_flags


def _translate(folder: pathlib.Path) -> list[str]:
    source, *_ = sorted((folder / "run/decode_test").glob("*.source.txt"))
    return [f"--bundle={folder / 'bundle'}", f"--input={source}", f"--output={folder / 'out.txt'}"]


def _generate(folder: pathlib.Path) -> list[str]:
    prompts, *_ = sorted((folder / "lm_run/decode_test").glob("*.prompt.txt"))
    files = [f"--input={prompts}", f"--output={folder / 'lm_out.txt'}"]
    return [f"--bundle={folder / 'lm_bundle'}", *files]


def _prune(folder: pathlib.Path) -> list[str]:
    codes = [language.code for language in manifest.load(folder / "data").languages]
    return [
        f"--logdir={folder / 'run'}",
        f"--out={folder / 'pruned'}",
        f"--languages={','.join(codes)}",
        "--keep=0.5",
    ]


def _import(folder: pathlib.Path) -> list[str]:
    return [f"--from={_PRETRAINED}", f"--logdir={folder / 'imported'}"]


def _plan_program(folder: pathlib.Path) -> list[str]:
    program = folder / "soak.hlo"
    program.write_text(_PROGRAM)
    return [f"--program={program}", "--topology=v3:2x2", f"--out={folder / 'plan'}"]


_WEIGHTS = "run/weights.safetensors"
_DECODED = ("decode_test/*.txt", "decode_test/*.json")


def _decoded(run: str) -> Callable[[pathlib.Path], Any]:
    return _hashes(*(f"{run}/{pattern}" for pattern in _DECODED))


def _bundle_hashes(name: str) -> Callable[[pathlib.Path], Any]:
    return _hashes(f"{name}/*.safetensors", f"{name}/**/*.model")


_BUILD = "data_prep.build"
_TRAINER = "lingvo_gshard.trainer"
_EXPORT = "lingvo_gshard.export_bundle"
_STAGES = (
    Stage("prepare", _BUILD, _prepare, ("data",), _hashes("data/**/*")),
    Stage("train", _TRAINER, _train, ("run",), _run_in("run")),
    Stage("evaluate", _TRAINER, _trainer("eval"), (), _evaluation),
    Stage("decode", _TRAINER, _trainer("decode"), ("run/decode_test",), _decoded("run")),
    Stage("export", _TRAINER, _trainer("export"), (_WEIGHTS,), _hashes(_WEIGHTS)),
    Stage("bundle", _EXPORT, _export("bundle"), ("bundle",), _bundle_hashes("bundle")),
    Stage(
        "translate",
        "lingvo_gshard.translate",
        _translate,
        ("out.txt", "out.txt.parts"),
        _hashes("out.txt"),
    ),
    Stage(
        "saved model",
        _EXPORT,
        _export("saved_model"),
        ("saved_model",),
        _hashes("saved_model/variables/*.data-*", "saved_model/assets/*"),
    ),
    Stage("prune", "lingvo_gshard.prune", _prune, ("pruned",), _run_in("pruned")),
    Stage("import", "lingvo_gshard.import_model", _import, ("imported",), _run_in("imported")),
    Stage("prepare text", _BUILD, _prepare_lm, ("lm_data",), _hashes("lm_data/**/*")),
    Stage("train a language model", _TRAINER, _train_lm, ("lm_run",), _run_in("lm_run")),
    Stage(
        "decode prompts",
        _TRAINER,
        _trainer("decode", "lm_run"),
        ("lm_run/decode_test",),
        _decoded("lm_run"),
    ),
    Stage(
        "bundle of a language model",
        _EXPORT,
        _export("lm_bundle", "lm_run"),
        ("lm_bundle",),
        _bundle_hashes("lm_bundle"),
    ),
    Stage(
        "generate",
        "lingvo_gshard.generate",
        _generate,
        ("lm_out.txt", "lm_out.txt.parts"),
        _hashes("lm_out.txt"),
    ),
    Stage("plan", "lingvo_gshard.plan_programs", _plan_program, ("plan",), _plan),
)


def main(argv: list[str]) -> None:
    del argv
    whole = pathlib.Path(_FOLDER.value, "whole")
    disturbed = pathlib.Path(_FOLDER.value, "disturbed")
    for folder in (whole, disturbed):
        folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(whole.parent / "kills.json").read()
    stages = [stage for stage in _STAGES if not _ONLY.value or stage.name in _ONLY.value]

    for stage in stages:
        if stage.name not in progress.secs:
            progress.secs[stage.name] = _undisturbed_secs(stage, whole)
            progress.write()

    # The kills are divided as evenly as possible among the commands.
    first_kill = 0
    for i, stage in enumerate(stages, start=1):
        next_kill = _NUM_KILLS.value * i // len(stages)
        _disturb(stage, disturbed, progress, next_kill - first_kill, stage.result(whole))
        first_kill = next_kill
        print(f"{stage.name}: {progress.kills.get(stage.name, 0)} kills", flush=True)

    rows: list[tuple[object, ...]] = [("command", "kills", "ended before its kill")]
    for stage in stages:
        num_kills = progress.kills.get(stage.name, 0)
        rows.append((stage.name, num_kills, progress.ended.get(stage.name, 0)))
    print(table.text(rows))
    print("All results equal those of the undisturbed commands.")


def _undisturbed_secs(stage: Stage, folder: pathlib.Path) -> float:
    """Returns the seconds that a command takes; it must succeed twice with the same result."""
    _check_success(stage, _status(stage, folder), folder)
    wanted = stage.result(folder)
    _delete(stage, folder)

    # The second run is timed, in which the programs are already compiled.
    began_secs = time.monotonic()
    _check_success(stage, _status(stage, folder), folder)
    secs = time.monotonic() - began_secs
    _check_result(stage, folder, wanted)
    return secs


def _disturb(
    stage: Stage, folder: pathlib.Path, progress: Progress, num_kills: int, wanted: Any
) -> None:
    """Kills a command `num_kills` times, then lets it end, and checks every result."""
    while progress.kills.get(stage.name, 0) < num_kills:
        num_starts = progress.kills.get(stage.name, 0) + progress.ended.get(stage.name, 0)
        seed = f"{_SOAK_SEED.value} {stage.name} {num_starts}"
        share = random.Random(seed).uniform(0.05, 1.05)
        saved_before = _saved_steps(folder)

        try:
            status = _status(stage, folder, share * progress.secs[stage.name])
        except subprocess.TimeoutExpired:
            progress.kills[stage.name] = progress.kills.get(stage.name, 0) + 1
        else:
            # It was faster than usual, and starts from the beginning.
            _check_success(stage, status, folder)
            _check_result(stage, folder, wanted)
            progress.ended[stage.name] = progress.ended.get(stage.name, 0) + 1
            _delete(stage, folder)
            saved_before = {}

        saved_after = _saved_steps(folder)
        for run, step in saved_before.items():
            if saved_after[run] < step:
                raise app.Error(f"{stage.name}: the checkpoint of step {step} of {run} is lost.")
        progress.write()

    _check_success(stage, _status(stage, folder), folder)
    _check_result(stage, folder, wanted)


def _saved_steps(folder: pathlib.Path) -> dict[str, int]:
    """Returns the step of the newest complete checkpoint of each training run."""
    return {name: Run(folder / name).saved_step() for name in ("run", "lm_run")}


def _delete(stage: Stage, folder: pathlib.Path) -> None:
    """Deletes the output files of a command."""
    for name in stage.made:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).unlink(missing_ok=True)


def _status(stage: Stage, folder: pathlib.Path, timeout_secs: float | None = None) -> int:
    """Runs a command, whose output goes to a log; returns its exit status.

    After the timeout, which raises TimeoutExpired, and at any other exception, the command is
    killed with all of its processes.
    """
    with (folder / f"{stage.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", stage.module, *stage.flags(folder.absolute())],
            stdout=log,
            stderr=log,
            cwd=_ROOT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_secs)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _check_success(stage: Stage, status: int, folder: pathlib.Path) -> None:
    if status:
        log = (folder / f"{stage.name}.log").read_text(encoding="utf-8", errors="replace")
        raise app.Error(f"{stage.name} ended with status {status}: {log[-2000:]}")


def _check_result(stage: Stage, folder: pathlib.Path, wanted: Any) -> None:
    result = stage.result(folder)
    if result != wanted:
        raise app.Error(f"{stage.name}: the result in {folder} is {result}, expected {wanted}.")


if __name__ == "__main__":
    app.run(main)
