"""The notebook runs from its first cell to its last."""

import json
import re

import pytest

from tests.docs import scripts


def _notebook():
    return json.loads((scripts.ROOT / "docs" / "laptop.ipynb").read_text())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_cell_runs(tmp_path):
    cells = [cell for cell in _notebook()["cells"] if cell["cell_type"] == "code"]
    printed = scripts.output("\n".join("".join(c["source"]) + "\n" for c in cells), tmp_path)
    assert re.search(r"loss [\d.]+ -> [\d.]+", printed)
    assert "routing." in printed


def test_it_is_stored_without_outputs():
    assert not any(cell.get("outputs") for cell in _notebook()["cells"])
