"""The time until the commands answer: errors for mistakes, and the first line of `translate`.

    python -m bench.first_answer --logdir=RUN

The benchmark translates with a copy of RUN, and with a bundle that is exported from it. Traced and
compiled programs are cached as usual, so the first start may take long, and the later ones show the
cost of a start. Times are wall seconds until the answer, and CPU seconds of the whole process.
"""

import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from absl import flags

from lingvo_gshard import cli
from xla_spmd.files import table

_LOGDIR = flags.DEFINE_string("logdir", None, "A run with a checkpoint.", required=True)
_LINE = flags.DEFINE_string("line", "a line to translate", "The line that is translated.")
_WITH_MISTAKES = flags.DEFINE_bool("mistakes", True, "Whether to measure mistakes, too.")
_STARTS = ("first", "second", "third")
_PLAN = "--topology=v3:2x2 --out=/nowhere/plan"
_MISTAKES = (
    "trainer --logdir=/nowhere --mode=trian",
    "trainer --logdir=/nowhere",
    "trainer --logdir=/nowhere --data_dir=/nowhere",
    "trainer --logdir=RUN --model=toy.MoE",
    "trainer --logdir=RUN --set=bogus=1",
    "trainer --logdir=RUN --set=task.encoder=5",
    f"plan {_PLAN} --model=toy.MoE",
    f"plan {_PLAN} --model=toy.MoE8E4L --set=bogus=1",
    "plan --compare=/nowhere,/nowhere",
    "translate --logdir=/nowhere",
    "translate --logdir=RUN --source_lang=xx",
    "translate --bundle=/nowhere",
    "serve --bundle=/nowhere",
    "export_bundle --logdir=/nowhere --bundle=/nowhere/bundle",
    "compare --run=a=/nowhere",
    "data_prep.build --out=/nowhere/data --input=/nowhere",
    "data_prep.build --out=/nowhere/data --config=/nowhere",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "run")
        shutil.copytree(_LOGDIR.value, copy)
        print(table.text([("command", "wall s", "CPU s", "answer"), *_rows(copy)]))


def _rows(run_dir: pathlib.Path) -> Iterator[tuple[str, ...]]:
    if _WITH_MISTAKES.value:
        for command in _MISTAKES:
            yield (command, *_measured(command, run_dir))

    for start in _STARTS:
        yield (f"{start} translate --logdir=RUN", *_measured("translate --logdir=RUN", run_dir))

    bundle = run_dir.with_name("bundle")
    export = ("lingvo_gshard.export_bundle", f"--logdir={run_dir}", f"--bundle={bundle}")
    subprocess.run([sys.executable, "-m", *export], check=True, capture_output=True)
    command = f"translate --bundle={bundle}"
    for start in _STARTS:
        yield (f"{start} translate --bundle=BUNDLE", *_measured(command, run_dir))


def _measured(command: str, run_dir: pathlib.Path) -> tuple[str, str, str]:
    """Returns wall and CPU seconds, and the answer's beginning, from stdout or else from stderr."""
    name, *args = command.replace("RUN", str(run_dir)).split()
    module = name if name.startswith("data_prep") else f"lingvo_gshard.{name}"
    pipe = subprocess.PIPE
    began = time.monotonic()
    before = _cpu_secs()
    with subprocess.Popen(
        [sys.executable, "-m", module, *args], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(f"{_LINE.value}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        secs = time.monotonic() - began
        process.stdin.close()
        answer = answer or process.stderr.read()
    return f"{secs:.2f}", f"{_cpu_secs() - before:.2f}", answer.strip()[:40]


def _cpu_secs() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    cli.run("first_answer", main)
