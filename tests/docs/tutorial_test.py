"""docs/tutorial.md runs as it stands, block after block, in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs(tmp_path):
    blocks = _BLOCK.findall((_ROOT / "docs/tutorial.md").read_text())
    assert len(blocks) > 10
    script = tmp_path / "tutorial.py"
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
    assert re.search(r"squared error [\d.]+ -> [\d.]+", result.stdout)
