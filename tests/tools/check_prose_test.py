"""The check of turns of phrase: each turn is found, in each kind of text, unless it is allowed."""

import subprocess
import sys

import pytest

from tests.docs.scripts import ROOT
from tools import check_prose


def _found(name: str, content: str) -> list[tuple[int, str]]:
    """Returns the line and the turn of each finding."""
    found = check_prose.findings(name, content)
    return [(finding.line, finding.message.split(":")[0]) for finding in found]


@pytest.mark.parametrize("turn", check_prose.TURNS, ids=lambda turn: turn.name)
def test_each_turn_is_found_in_its_example_and_not_in_the_better_form(turn):
    messages = [finding.message for finding in check_prose.findings("page.md", turn.example)]
    assert any(message.startswith(f"{turn.name}: ") for message in messages)
    assert all(turn.better in message for message in messages if message.startswith(turn.name))
    assert _found("page.md", turn.better) == []


PYTHON = '''"""A module.

It has what
is left.
"""

from absl import flags

LIMIT = 8  # Of the rows, the last.
# The first line of a comment that goes
# on with the second line.
FLAG = flags.DEFINE_string("name", None, "The name; none has none.")
TEXT = "what is a value of the program, and not prose"


class A:
    """A is no B."""

    def f(self):
        """Reads `what is` code."""
        raise ValueError(f"{self} is "
                         f"no number")
'''


def test_comments_docstrings_messages_and_help_are_read():
    assert sorted(_found("module.py", PYTHON)) == [
        (3, "noun-what"),
        (9, "of-first"),
        (10, "goes-on"),
        (12, "has-none"),
        (17, "is-no"),
        (21, "is-no"),
    ]


PAGE = """# What it is

A page tells
which is which.

- An item
- Of the items, the last

| what it is | a cell |
|---|---|

    what is code

```
what is code
```

`name` is no name.
"""


def test_headings_paragraphs_and_items_are_read_and_code_and_tables_are_not():
    assert _found("page.md", PAGE) == [
        (1, "noun-what"),
        (3, "tells"),
        (7, "of-first"),
        (18, "is-no"),
    ]


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("page.md", "It answers what is asked. <!-- prose: noun-what -->"),
        ("page.md", "It has none of\nwhat is asked. <!-- prose: noun-what, has-none -->"),
        ("module.py", "x = 1  # It answers what is asked.  # prose: noun-what"),
        ("module.py", '"""It answers\n\nwhat is asked.\n"""  # prose: noun-what'),
        ("module.py", 'raise ValueError("x is no y")  # prose: is-no'),
    ],
)
def test_an_escape_allows_the_turns_that_it_names(name, allowed):
    assert _found(name, allowed) == []
    assert _found(name, allowed.partition("  # prose")[0].partition(" <!--")[0]) != []


def test_an_escape_allows_only_its_text_and_its_turns():
    page = "It is no page. <!-- prose: noun-what -->\n\nIt is no page."
    assert [turn for _, turn in _found("page.md", page)] == ["is-no", "the escape `prose", "is-no"]
    (finding,) = check_prose.findings("page.md", "A page. <!-- prose: noun-who -->")
    assert finding.message == "the escape `prose: noun-who` does not name a turn"
    (finding,) = check_prose.findings("page.md", "A page. <!-- prose: is-no -->")
    assert finding.message == "the escape `prose: is-no` is not needed"


def test_a_question_may_begin_with_what():
    assert _found("page.md", "# What is a mesh?") == []
    assert _found("page.md", "There is no limit.") == []


def test_the_program_prints_each_place_and_its_status_is_1(tmp_path):
    (tmp_path / "a.md").write_text("A page.\nIt is no page.\n")
    (tmp_path / "b.py").write_text('"""A module."""\n')
    (tmp_path / "c.txt").write_text("what is not read")
    command = [sys.executable, "-m", "tools.check_prose"]

    result = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    better = "Raises ValueError if the value is not an integer."
    assert result.stdout == f"{tmp_path / 'a.md'}:2: is-no: 'is no '. Rather: {better!r}\n"

    result = subprocess.run([*command, str(tmp_path / "b.py")], cwd=ROOT, capture_output=True)
    assert (result.returncode, result.stdout) == (0, b"")


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="page.md does not exist"):
        check_prose.files([tmp_path / "page.md"])
