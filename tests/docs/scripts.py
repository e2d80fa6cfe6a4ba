"""Runs the documents' code in its own process and folder."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

# A block of a page that is a file, with its name.
_FILE = re.compile(r'^```\w+ title="([\w/.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def files_of_own_experiment() -> dict[str, str]:
    """Returns the contents of the files of docs/own_experiment.md by their names."""
    return dict(_FILE.findall((ROOT / "docs/own_experiment.md").read_text()))


def output(source: str, folder: pathlib.Path, name: str = "script.py") -> str:
    """Runs Python source as a file of that name, and returns the text that it prints.

    Raises AssertionError if it fails.
    """
    script = folder / name
    script.write_text(source)
    result = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "MPLBACKEND": "Agg",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
