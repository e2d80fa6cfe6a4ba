"""Runs the documents' code in its own process and folder."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


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
