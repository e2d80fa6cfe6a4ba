"""What the documents' code runs in: a process of its own, in a folder of its own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def output(source: str, folder: pathlib.Path) -> str:
    """What the Python source prints; AssertionError: it failed."""
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
