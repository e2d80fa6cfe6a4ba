"""Compiles programs by both of XLA's propagators, Shardy and GSPMD, and compares the results.

    python -m repro.propagation --out=OUT [--only=REGEX] [--steps=3]

XLA partitions a program in two steps: it propagates the annotations to all tensors, and then makes
each device's program. Only the first step differs. Shardy's variant of a program is the library's.
GSPMD's variant is the same program without the pass of xla_spmd/annotations/shardy.py, whose
annotations make XLA fall back to GSPMD. When JAX drops that fallback, this comparison will be
removed.

Each program is compiled in a separate process, since XLA aborts on some of them. On virtual devices
of a CPU it also runs, from the same state and on the same random tokens in both variants. OUT
belongs to one version of this library, and contains:

    compiled.jsonl  a line for each compiled program; an interrupted run continues after the last
    programs/       the programs that TensorFlow has traced
    table.md        the table of all rows in the log, which is also printed

In the table, `A -> B` is GSPMD's number and Shardy's; a single number is the same for both. For
each kind of collective, the table has the number of runs in a call and the MiB of their results on
one device.
"""

import collections
import dataclasses
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.plans.plan import DECODE, TRAIN
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import executable
from lingvo_gshard.spmd.executable import Executable
from repro import propagation_programs as programs
from repro import propagation_table
from repro.propagation_programs import CPU, GSPMD, PROPAGATORS, SHARDY, Case
from repro.propagation_table import Compiled, Row
from xla_plan.machines import topology
from xla_spmd.files import atomic_file, json_records, table
from xla_spmd.hlo.collectives import COLLECTIVES
from xla_spmd.hlo.compiled_report import CompiledReport
from xla_spmd.mesh import Mesh
from xla_spmd.runtime import environment

# XLA's message in the log when it finds GSPMD's annotations.
_FALLS_BACK = "falling back to using GSPMD propagation"


def main() -> None:
    out = pathlib.Path(flags.FLAGS.out)
    (out / "programs").mkdir(parents=True, exist_ok=True)
    if flags.FLAGS.case is not None:
        case = programs.CASES[flags.FLAGS.case]
        fields = _compile(case, flags.FLAGS.machine, flags.FLAGS.propagator, out, flags.FLAGS.steps)
        print(json.dumps(fields))
        return

    chosen = list(_chosen())
    _check_compilers(chosen)
    log = out / "compiled.jsonl"
    compiled = _load(log)

    for number, case, machine in chosen:
        for propagator in PROPAGATORS:
            key = case.key(machine, propagator)
            if key not in compiled:
                compiled[key] = _in_process(number, machine, propagator, key, out)
                _append(log, compiled[key])
                print(_line(case, machine, propagator, compiled[key]), flush=True)
        _write(out, _rows(compiled))

    rows = _rows(compiled)
    print(table.text([propagation_table.HEADER, *(row.cells() for row in rows)]))
    print(propagation_table.summary(rows))


def _rows(compiled: Mapping[str, Compiled]) -> list[Row]:
    """Returns the rows of the table for which both propagators have already run."""
    rows = []
    for case in programs.CASES:
        for machine in case.machines:
            gspmd = compiled.get(case.key(machine, GSPMD))
            shardy = compiled.get(case.key(machine, SHARDY))
            if gspmd is not None and shardy is not None:
                rows.append(Row(f"{case.model}: {case.name}", machine, gspmd, shardy))
    return rows


def _chosen() -> Iterator[tuple[int, Case, str]]:
    """Yields the cases that --only selects, each with its number and a machine."""
    try:
        re.compile(flags.FLAGS.only)
    except re.error as error:
        raise ValueError(
            f"--only={flags.FLAGS.only}: expected a regular expression: {error}."
        ) from None

    for number, case in enumerate(programs.CASES):
        for machine in case.machines:
            if re.search(flags.FLAGS.only, f"{case.model}: {case.name}, {machine}"):
                yield number, case, machine


def _check_compilers(chosen: Iterable[tuple[int, Case, str]]) -> None:
    """Raises ValueError if the compiler for a machine is not installed."""
    for _, _, machine in chosen:
        if machine != CPU and not topology.is_installed(machine):
            raise ValueError(
                f"the compiler for {machine} is not installed: `make setup-compilers` installs it, "
                f"and --only={CPU} does without it."
            )


# --- The log ---


def _load(log: pathlib.Path) -> dict[str, Compiled]:
    """Returns the compiled programs of the log by key, and removes an incomplete last line."""
    if not log.exists():
        return {}
    text = log.read_text(encoding="utf-8")
    whole, newline, _ = text.rpartition("\n")
    log.write_text(whole + newline, encoding="utf-8")

    compiled = {}
    for line in whole.splitlines():
        record = json_records.read(Compiled, json_records.parse(line))
        compiled[record.key] = record
    return compiled


def _append(log: pathlib.Path, compiled: Compiled) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(compiled)) + "\n")


def _line(case: Case, machine: str, propagator: str, compiled: Compiled) -> str:
    """Returns a line about a program that has just been compiled."""
    how = compiled.failure or f"{compiled.compile_secs:.1f} s of the CPU"
    return f"{case.model}: {case.name}, {machine}, {propagator}: {how}"


def _write(out: pathlib.Path, rows: list[Row]) -> None:
    """Writes the table and its summary."""
    markdown = table.markdown([propagation_table.HEADER, *(row.cells() for row in rows)])
    summary = propagation_table.summary(rows)
    with atomic_file.replacing(out / "table.md") as partial:
        partial.write_text(f"{markdown}\n{summary}\n", encoding="utf-8")


# --- A process for each program ---


def _in_process(
    number: int, machine: str, propagator: str, key: str, out: pathlib.Path
) -> Compiled:
    """Compiles a program in a separate process, which XLA may abort."""
    command = [sys.executable, "-m", "repro.propagation", f"--out={out}", f"--case={number}"]
    command += [
        f"--machine={machine}",
        f"--propagator={propagator}",
        f"--steps={flags.FLAGS.steps}",
    ]
    # The process needs XLA's whole log, and must not use an earlier compilation.
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "LINGVO_GSHARD_COMPILATION_CACHE": "off"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=flags.FLAGS.timeout_secs
        )
    except subprocess.TimeoutExpired:
        return _failed(key, f"takes longer than {flags.FLAGS.timeout_secs} s", "")

    if done.returncode:
        return _failed(key, _reason(done.returncode, done.stderr), done.stderr)
    fields = json.loads(done.stdout.splitlines()[-1])
    return json_records.read(
        Compiled, fields | {"key": key, "failure": "", "falls_back": _FALLS_BACK in done.stderr}
    )


def _failed(key: str, failure: str, log: str) -> Compiled:
    return Compiled(key, failure, _FALLS_BACK in log, {}, 0, 0, 0.0, (), ())


def _reason(status: int, log: str) -> str:
    """Returns the reason why a process ended, in one line: XLA's failed check, or the last line."""
    checks = re.findall(r"Check failed: .*", log)
    if checks:
        return f"aborts: {checks[0].strip()}"

    # A mistake is reported in one line, after which libraries may log more.
    message = re.search(r"^propagation: (.*)$", log, re.MULTILINE)
    if message:
        return f"refuses: {message[1]}"
    lines = [line for line in log.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "no message"
    return f"ends with status {status}: {last}"


def _compile(
    case: Case, machine: str, propagator: str, out: pathlib.Path, steps: int
) -> Mapping[str, object]:
    """Compiles a program, runs it on the CPU, and returns the fields of Compiled."""
    environment.prepare(programs.num_partitions(CPU), "cpu")
    program = programs.make(case, propagator, machine, out / "programs")

    before = _cpu_secs()
    if machine == CPU:
        compiled: Executable = executable.compile_program(program)
    else:
        compiled = topology_executable.compile_program(program, machine)
    compile_secs = _cpu_secs() - before

    report = compiled.report()
    numbers, tokens = _results(case, compiled, steps) if machine == CPU else ([], [])
    return {
        "collectives": _collectives(report),
        "instructions": report.num_instructions,
        "temp_bytes": report.temp_bytes,
        "compile_secs": compile_secs,
        "numbers": numbers,
        "tokens": tokens,
    }


def _cpu_secs() -> float:
    """Returns the CPU time of this process and of its ended children, such as ptxas."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _collectives(report: CompiledReport) -> dict[str, list[int]]:
    """Returns, by kind, the number of collectives in a call and the bytes of their results."""
    runs: collections.Counter[str] = collections.Counter()
    num_bytes: collections.Counter[str] = collections.Counter()
    for collective in report.collective_ops:
        runs[collective.kind] += collective.times
        num_bytes[collective.kind] += collective.times * collective.result_bytes
    return {kind: [runs[kind], num_bytes[kind]] for kind in COLLECTIVES if runs[kind]}


# --- The results on the CPU ---


def _results(case: Case, compiled: Executable, steps: int) -> tuple[list[float], list[int]]:
    """Runs a program on the CPU; returns its losses, metrics or scores, and its tokens."""
    state = _random_state(case)
    if case.kind == DECODE:
        state = NestedMap(theta=state.theta)

    if case.kind == TRAIN:
        losses = []
        for step in range(steps):
            result = compiled(state, _random_batch(compiled.program.args[1], step))
            state = result.state
            losses.append(float(np.asarray(result.metrics.loss)[0]))
        return losses, []

    result = compiled(state, _random_batch(compiled.program.args[1], 0))
    numbers: list[float] = []
    tokens: list[int] = []
    for array in map(np.asarray, result.Flatten()):
        if np.issubdtype(array.dtype, np.floating):
            numbers += array.astype(float).ravel().tolist()
        else:
            tokens += array.astype(int).ravel().tolist()
    return numbers, tokens


def _random_state(case: Case) -> NestedMap:
    """Returns the state before the first step, with weights of the model's distributions."""
    random = np.random.default_rng(0)

    def weight(spec: WeightSpec) -> np.ndarray:
        numbers = np.ones(spec.shape)
        if spec.is_gaussian:
            numbers = random.standard_normal(spec.shape)
        return (spec.scale * numbers).astype(np.float32)

    model = TaskModel(case.params(), Partitioning(Mesh.flat(1), ()))
    return NestedMap(
        step=np.int32(0),
        theta=model.task.weight_specs.Transform(weight),
        slots=model.state_spec.slots.Transform(lambda spec: np.zeros(spec.shape, spec.dtype)),
    )


def _random_batch(specs: NestedMap, seed: int) -> NestedMap:
    """Returns a batch of full rows of random tokens, one sentence each, with these TensorSpecs."""
    random = np.random.default_rng(seed)

    def array(path: str, spec: TensorSpec) -> np.ndarray:
        numbers: np.ndarray
        if path.endswith("positions"):
            numbers = np.broadcast_to(np.arange(spec.shape[-1]), spec.shape)
        elif path.endswith("segment_ids") or "weights" in path:
            numbers = np.ones(spec.shape)
        else:
            numbers = random.integers(4, programs.VOCABULARY, spec.shape)
        return numbers.astype(spec.dtype)

    return specs.Pack([array(path, spec) for path, spec in specs.FlattenItems()])


def _define_flags() -> None:
    """Defines this program's flags; other programs have flags of the same names."""
    flags.DEFINE_string("out", None, "The folder of the log and the table.", required=True)
    flags.DEFINE_string("only", "", "Compile only the rows that match this regular expression.")
    flags.DEFINE_integer("steps", 3, "Training steps on the CPU.", lower_bound=1)
    flags.DEFINE_integer("timeout_secs", 900, "Of one program.", lower_bound=1)
    # The flags of a process that compiles one program.
    flags.DEFINE_integer("case", None, "Compile only the case of this number, and print JSON.")
    flags.DEFINE_string("machine", CPU, "The machine of --case.")
    flags.DEFINE_enum("propagator", SHARDY, PROPAGATORS, "The propagator of --case.")


if __name__ == "__main__":
    _define_flags()
    cli.run("propagation", main)
