"""Every file that a document names exists."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_DOCUMENTS = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md")])
# Matches the paths of the project, such as `lingvo_gshard/x.py`, `L:x.py` and `docs/`.
_PATH = re.compile(
    r"`((?:L:|T:|(?:lingvo_gshard|params|data_prep|bench|tools|tests|docs|launch)/)[\w/.]*)`"
)
_SHORT = {"L:": "lingvo_gshard/", "T:": "tests/"}


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.name)
def test_every_path_exists(document):
    for path in _PATH.findall(document.read_text()):
        full = _SHORT.get(path[:2], path[:2]) + path[2:]
        assert (_ROOT / full).exists(), f"{document.name}: {path}"


def test_the_guide_to_the_paper_names_many_paths():
    assert len(_PATH.findall((_ROOT / "docs/paper.md").read_text())) > 50
