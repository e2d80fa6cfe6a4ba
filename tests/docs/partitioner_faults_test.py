"""Each program of examples/partitioner_faults/ shows the fault that its docstring describes."""

import ast
import dataclasses
import importlib.metadata
import re
import subprocess
import sys

import pytest

from tests.docs import scripts

_PAGE = (scripts.ROOT / "examples/partitioner_faults/README.md").read_text()
_PROGRAMS = scripts.ROOT / "examples/partitioner_faults"
# The output that the docstring of a program shows.
_SHOWN = re.compile(r"^    (.*)$", re.MULTILINE)
# A row of the table: a kind, a program's name and link, and a verdict for each version.
_ROW = re.compile(r"^\|[^|]*\| `(\w+)` \|([^|]*\|[^|]*)\|[^|]*\|[^|]*\|$", re.MULTILINE)
_VERSIONS = re.findall(r"\| jaxlib ([\d.]+) (?=\|)", _PAGE)
# One program of each kind of operator; the others are left to `make test-exhaustive`.
_SOME = ("segment_max", "gather", "strided_slice", "split_kernel", "fft")


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program of the page, with the output of its docstring and its verdicts on the page."""

    name: str
    printed: tuple[str, ...]
    verdicts: dict[str, str]  # By version: wrong, error, abort or right.


def _programs() -> list[_Program]:
    """Returns the programs of the page's table, in order."""
    programs = []
    for name, cells in _ROW.findall(_PAGE):
        docstring = ast.get_docstring(ast.parse((_PROGRAMS / f"{name}.py").read_text()))
        printed = tuple(_SHOWN.findall(docstring))
        assert len(printed) == 2, name
        words = [cell.strip() for cell in cells.split("|")]
        programs.append(_Program(name, printed, dict(zip(_VERSIONS, words, strict=True))))
    return programs


def _verdict(result: subprocess.CompletedProcess[str]) -> str:
    """Returns the outcome of a program: wrong, error, abort or right."""
    if result.returncode < 0:
        return "abort"
    if result.returncode > 0:
        return "error"
    values = dict(re.findall(r"^(whole|split) (.*)$", result.stdout, re.MULTILINE))
    return "right" if values["whole"] == values["split"] else "wrong"


def test_the_table_has_every_program():
    in_table = [program.name for program in _programs()]
    assert sorted(in_table) == sorted(path.stem for path in _PROGRAMS.glob("*.py"))


def test_every_verdict_is_known():
    for program in _programs():
        assert set(program.verdicts.values()) <= {"wrong", "error", "abort", "right"}
        assert set(program.verdicts.values()) != {"right"}, program.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=[] if program.name in _SOME else pytest.mark.exhaustive)
        for program in _programs()
    ],
    ids=lambda program: program.name,
)
def test_the_program_prints_its_documented_output(program, tmp_path):
    """A version that the page lacks is compared with the last one of the page."""
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
            "may go. Add a column for this version to examples/partitioner_faults/README.md."
        )
    assert verdict == expected, f"jaxlib {version}: {program.name}\n{output[-3000:]}"
    if verdict == "right":
        return
    for line in program.printed:
        assert line in output, f"jaxlib {version}: {program.name}\n{output[-3000:]}"
