"""Runs programs in processes that end, with status 2, if they import certain modules."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

SLOW = ("tensorflow", "jax", "grain", "orbax", "matplotlib")  # Packages that take long to import.

_ROOT = pathlib.Path(__file__).parent.parent

_REFUSE = """
import os, runpy, sys
refused, *rest = sys.argv[1:]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{module}.") for module in refused.split(",")):
            print(f"{name} is imported", file=sys.stderr, flush=True)
            os._exit(2)

sys.meta_path.insert(0, Refuse())
"""

_ONE = """
module, *sys.argv[1:] = rest
runpy.run_module(module, run_name="__main__")
"""

# Each line that is read names a program, which runs in a fork.
_MANY = """
import json
import data_prep.config, data_prep.pipeline, params.toy
import lingvo_gshard.plans.request, lingvo_gshard.runs.opening

for line in sys.stdin:
    module, flags, outputs = json.loads(line)
    if not (child := os.fork()):
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    os._exit(0)

os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for descriptor, path in enumerate(outputs, start=1):
    os.dup2(os.open(path, os.O_WRONLY), descriptor)
sys.argv[1:] = flags
runpy.run_module(module, run_name="__main__")
"""


def command(refused: tuple[str, ...], module: str, *flags: str) -> list[str]:
    """Returns the command that runs `python -m module *flags` without the modules `refused`."""
    return [sys.executable, "-c", _REFUSE + _ONE, ",".join(refused), module, *flags]


class Programs:
    """Runs programs one after another, each in a fork of a process that has the common imports."""

    def __init__(self, refused: tuple[str, ...]):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _REFUSE + _MANY, ",".join(refused)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=os.environ
            | {"OPENBLAS_NUM_THREADS": "1"},  # Only a process of one thread may fork.
        )

    def run(self, module: str, *flags: str) -> subprocess.CompletedProcess:
        """Runs `python -m module *flags`."""
        with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
            request = [module, flags, [stdout.name, stderr.name]]
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            status = self._process.stdout.readline()
            assert status, f"the process ended with status {self._process.wait()}"
            return subprocess.CompletedProcess(flags, int(status), stdout.read(), stderr.read())

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
