"""The documents' Python blocks run as they stand, in order, in a process of their own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("document", "printed"),
    [
        ("tutorial.md", r"squared error [\d.]+ -> [\d.]+"),
        ("extending.md", r"num_experts : 16"),
        ("estimator.md", r"step 500, accuracy 0\.9"),
    ],
)
def test_every_block_runs(document, printed, tmp_path):
    blocks = _BLOCK.findall((_ROOT / "docs" / document).read_text())
    assert blocks
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks))
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.search(printed, result.stdout)
