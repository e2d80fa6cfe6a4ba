"""The notebook runs from its first cell to its last, in a process of its own."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    notebook = json.loads((_ROOT / "docs" / "laptop.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) + "\n" for cell in cells))
    result = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "TMPDIR": str(tmp_path),
            "MPLBACKEND": "Agg",
        },
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.search(r"loss [\d.]+ -> [\d.]+", result.stdout)
    assert "routing." in result.stdout


def test_it_is_kept_without_outputs():
    notebook = json.loads((_ROOT / "docs" / "laptop.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"])
