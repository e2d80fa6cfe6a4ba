"""Every program of docs/partitioner_faults.md shows its fault as the page states."""

import dataclasses
import importlib.metadata
import re
import subprocess
import sys

import pytest

from tests.docs import scripts

_PAGE = (scripts.ROOT / "docs" / "partitioner_faults.md").read_text()
_PROGRAMS = scripts.ROOT / "examples/partitioner_faults"
_SECTION = re.compile(r"^### (\w+)\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A row of the table: a kind, a program's name and link, and a verdict for each version.
_ROW = re.compile(r"^\|[^|]*\| \[(\w+)\]\(#\1\) \|(.*?)\|[^|]*\|$", re.MULTILINE)
_VERSIONS = re.findall(r"\| jaxlib ([\d.]+) (?=\|)", _PAGE)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program of the page, with its verdicts there."""

    name: str
    printed: tuple[str, ...]
    verdicts: dict[str, str]  # By version: wrong, error, abort or right.


def _programs() -> list[_Program]:
    """Returns the programs of the page, in order."""
    verdicts = {}
    for name, cells in _ROW.findall(_PAGE):
        words = [cell.strip() for cell in cells.split("|")]
        verdicts[name] = dict(zip(_VERSIONS, words, strict=True))
    return [
        _Program(name, tuple(printed.splitlines()), verdicts[name])
        for name, printed in _SECTION.findall(_PAGE)
    ]


def _verdict(result: subprocess.CompletedProcess[str]) -> str:
    """Returns what a program shows: wrong, error, abort or right."""
    if result.returncode < 0:
        return "abort"
    if result.returncode > 0:
        return "error"
    values = dict(re.findall(r"^(whole|split) (.*)$", result.stdout, re.MULTILINE))
    return "right" if values["whole"] == values["split"] else "wrong"


def test_every_program_of_the_table_is_on_the_page():
    in_table = [name for name, _ in _ROW.findall(_PAGE)]
    assert in_table
    assert in_table == [program.name for program in _programs()]
    assert sorted(in_table) == sorted(path.stem for path in _PROGRAMS.glob("*.py"))


def test_every_verdict_is_known():
    for program in _programs():
        assert set(program.verdicts.values()) <= {"wrong", "error", "abort", "right"}
        assert set(program.verdicts.values()) != {"right"}, program.name


@pytest.mark.slow
@pytest.mark.parametrize("program", _programs(), ids=lambda program: program.name)
def test_the_program_prints_what_the_page_says(program, tmp_path):
    """Another version than those of the page is compared with the last of them."""
    result = subprocess.run(
        [sys.executable, str(_PROGRAMS / f"{program.name}.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    version = importlib.metadata.version("jaxlib")
    expected = program.verdicts.get(version, program.verdicts[_VERSIONS[-1]])
    verdict = _verdict(result)

    output = result.stdout + result.stderr
    if verdict == "right" and expected != "right":
        pytest.fail(
            f"jaxlib {version}: {program.name} is right. XLA no longer has this fault: the repair "
            "may go. Add a column for this version to docs/partitioner_faults.md."
        )
    assert verdict == expected, f"jaxlib {version}: {program.name}\n{output[-3000:]}"
    if verdict == "right":
        return
    for line in program.printed:
        assert line in output, f"jaxlib {version}: {program.name}\n{output[-3000:]}"
