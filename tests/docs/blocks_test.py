"""The Python blocks of each document run unchanged, in order, in one process."""

import re

import pytest

from tests.docs import scripts

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("document", "printed"),
    [
        pytest.param("tutorial.md", r"squared error [\d.]+ -> [\d.]+", marks=pytest.mark.slow),
        pytest.param(
            "extending.md", r"num_experts : 16[\s\S]*\n128 128 16 dev", marks=pytest.mark.slow
        ),
        pytest.param(
            "estimator.md",
            r"step 500, accuracy 0\.9[\s\S]*\nported: step 200, accuracy 0\.9\d+, 0\.",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_block_runs(document, printed, tmp_path):
    blocks = _BLOCK.findall((scripts.ROOT / "docs" / document).read_text())
    assert blocks
    assert re.search(printed, scripts.output("\n".join(blocks), tmp_path))
