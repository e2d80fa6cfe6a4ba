"""Runs the documents' code in its own process and folder."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def output(source: str, folder: pathlib.Path) -> str:
    """Runs Python source and returns what it prints; AssertionError if it fails."""
    script = folder / "script.py"
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
