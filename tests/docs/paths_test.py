"""Every file that a document names or links to exists."""

import ast
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_ROOMS = sorted(
    path
    for folder in (
        "lingvo_gshard",
        "xla_plan",
        "xla_spmd",
        "data_prep",
        "bench",
        "repro",
        "tools",
        "examples",
    )
    for path in (_ROOT / folder).rglob("*.md")
)
_DOCUMENTS = [*sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md")]), *_ROOMS]
# Matches the paths of the project, such as `lingvo_gshard/x.py`, `L:x.py` and `docs/`.
_FOLDERS = (
    "lingvo_gshard|xla_plan|xla_spmd|repro|params|data_prep|bench|tools|tests|docs|launch|examples"
)
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


_READMES = [path for path in _ROOMS if path.name == "README.md"]


@pytest.mark.parametrize("readme", _READMES, ids=lambda path: path.parent.name)
def test_a_readme_names_existing_files(readme):
    named = re.findall(r"`([\w/]+(?:\.py|/))`", readme.read_text())
    assert named
    for name in named:
        places = (readme.parent, readme.parent.parent, _ROOT)
        assert any((place / name).exists() for place in places), name


@pytest.mark.parametrize("folder", ["lingvo_gshard", "data_prep", "bench", "repro", "xla_spmd"])
def test_every_large_room_has_a_readme(folder):
    for room in [_ROOT / folder, *(_ROOT / folder).iterdir()]:
        is_large = len(list(room.glob("*.py"))) > 10 and room.name != "lingvo_gshard"
        assert not is_large or (room / "README.md").exists(), room


def test_every_page_is_in_the_navigation_and_in_the_index():
    pages = {path.name for path in (_ROOT / "docs").glob("*.md")}
    navigation = (_ROOT / "mkdocs.yml").read_text()
    assert set(re.findall(r": (\w+\.md)$", navigation, re.MULTILINE)) == pages

    index = (_ROOT / "docs/index.md").read_text()
    assert set(_LINK.findall(index)) == pages - {"index.md"}


_WAY = re.compile(r"^\|[^|]+\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_every_function_of_the_architecture_s_ways_exists():
    page = (_ROOT / "docs/architecture.md").read_text()
    ways = page.partition("## The way of one batch")[2].partition("## Which room")[0]
    rows = [row for row in _WAY.findall(ways) if row[0].startswith("`")]
    assert len(rows) > 20
    for files, names in rows:
        defined = set()
        for name in _PATH.findall(files):
            tree = ast.parse((_ROOT / (_SHORT.get(name[:2], name[:2]) + name[2:])).read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    defined |= {f"{node.name}.{getattr(part, 'name', '')}" for part in node.body}
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    defined.add(node.name)
        assert set(re.findall(r"`([\w.]+)`", names)) <= defined, files


def test_the_guide_to_the_paper_names_many_paths():
    assert len(_PATH.findall((_ROOT / "docs/paper.md").read_text())) > 50
