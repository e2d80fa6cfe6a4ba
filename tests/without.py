"""Runs a binary in a process that ends, with status 2, if it imports certain modules."""

import sys

_CODE = """
import os, runpy, sys
refused, module, *sys.argv[1:] = sys.argv[1:]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{module}.") for module in refused.split(",")):
            print(f"{name} is imported", file=sys.stderr, flush=True)
            os._exit(2)

sys.meta_path.insert(0, Refuse())
runpy.run_module(module, run_name="__main__")
"""


def command(refused: tuple[str, ...], module: str, *flags: str) -> list[str]:
    """Returns the command that runs `python -m module *flags` without the modules `refused`."""
    return [sys.executable, "-c", _CODE, ",".join(refused), module, *flags]
