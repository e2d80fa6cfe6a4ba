"""The Python blocks of each document run unchanged, in order, beside own_experiment.md's files."""

import re

import pytest

from tests import exhaustive
from tests.docs import scripts

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHOWN = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Lines of a report that differ between versions of XLA.
_BY_VERSION = re.compile(r"instructions|gflop|\w+ MiB")


@pytest.mark.parametrize(
    ("document", "printed"),
    [
        pytest.param(
            "tutorial.md",
            r"\n400 error 0\.[0-6][\s\S]*\nOft malt die Katze den Baum\. -> The cat paints",
            marks=exhaustive.RARE,
        ),
        pytest.param("functions.md", r"^all equal$", marks=pytest.mark.slow),
        pytest.param("extending.md", r"\n128 128 16 dev", marks=pytest.mark.slow),
        pytest.param(
            "estimator.md",
            r"^ported: step 200, accuracy 0\.9\d+, 0\.",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_block_runs(document, printed, tmp_path):
    page = (scripts.ROOT / "docs" / document).read_text()
    blocks = _BLOCK.findall(page)
    assert blocks

    for name, content in scripts.files_of_own_experiment().items():
        (tmp_path / name).write_text(content)
    output = scripts.output("\n".join(blocks), tmp_path)
    assert re.search(printed, output)
    for shown in _SHOWN.findall(page):
        for line in shown.splitlines():
            assert _BY_VERSION.match(line) or line in output


def test_the_tutorial_uses_only_public_names():
    blocks = "\n".join(_BLOCK.findall((scripts.ROOT / "docs/tutorial.md").read_text()))
    own = set(re.findall(r"^(?:import|from) ((?:lingvo_gshard|xla_\w+)\S*)", blocks, re.MULTILINE))
    assert own == {"lingvo_gshard"}
    assert _SHOWN.search((scripts.ROOT / "docs/tutorial.md").read_text())
