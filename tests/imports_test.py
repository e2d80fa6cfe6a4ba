"""Every module can be imported, so that an unsupported version of Python or a package is found."""

import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parent.parent
_IMPORTS = """
import importlib
import sys

from absl import flags

for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except flags.DuplicateFlagError:
        print(name)  # Two programs have a flag of this name.
"""


def test_every_module_is_imported():
    """Programs that share flags are each started by cli_test.py."""
    names = []
    for package in ("lingvo_gshard", "xla_plan", "xla_spmd", "params", "data_prep"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            module = path.relative_to(_ROOT).with_suffix("")
            names.append(".".join(module.parts).removesuffix(".__init__"))

    command = [sys.executable, "-c", _IMPORTS, *names]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    programs = done.stdout.split()
    assert len(programs) < 20 < 400 < len(names)
    assert not any(len(name.split(".")) > 2 for name in programs), programs
