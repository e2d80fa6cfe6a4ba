"""Every file that a document names or links to exists."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_DOCUMENTS = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md")])
# Matches the paths of the project, such as `lingvo_gshard/x.py`, `L:x.py` and `docs/`.
_FOLDERS = "lingvo_gshard|params|data_prep|bench|tools|tests|docs|launch|examples"
_PATH = re.compile(rf"`((?:L:|T:|(?:{_FOLDERS})/)[\w/.]*)`")
_SHORT = {"L:": "lingvo_gshard/", "T:": "tests/"}
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.name)
def test_every_path_exists(document):
    for path in _PATH.findall(document.read_text()):
        full = _SHORT.get(path[:2], path[:2]) + path[2:]
        assert (_ROOT / full).exists(), f"{document.name}: {path}"


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document):
    for target in _LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_page_is_in_the_navigation_and_in_the_index():
    pages = {path.name for path in (_ROOT / "docs").glob("*.md")}
    navigation = (_ROOT / "mkdocs.yml").read_text()
    assert set(re.findall(r": (\w+\.md)$", navigation, re.MULTILINE)) == pages

    index = (_ROOT / "docs/index.md").read_text()
    assert set(_LINK.findall(index)) == pages - {"index.md"}


def test_the_guide_to_the_paper_names_many_paths():
    assert len(_PATH.findall((_ROOT / "docs/paper.md").read_text())) > 50
