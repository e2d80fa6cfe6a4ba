"""Every flag that a document gives to one of the programs exists."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_DOCUMENTS = [_ROOT / "README.md", _ROOT / "docs/operating.md", *(_ROOT / "launch").iterdir()]
_PROGRAMS = "trainer|translate|export_bundle|serve|plan|compare"
_PROGRAM = re.compile(rf"\blingvo_gshard\.({_PROGRAMS})\b")
_WITH_A_MODEL = ("translate", "export_bundle", "serve")
_FLAG = re.compile(r"(?<!\S)--(\w+)")
_DEFINED = re.compile(r'DEFINE_\w+\(\s*"(\w+)"')


def _commands(text):
    """Yields the program and the flags of each command; a backslash continues a line."""
    for line in text.replace("\\\n", " ").splitlines():
        if command := _PROGRAM.search(line.split("#")[0]):
            yield command[1], _FLAG.findall(line, command.end())


def _defined(program):
    """Returns the names of a program's flags, those that it shares with others among them."""
    modules = [program, "cli"]
    if program in _WITH_A_MODEL:
        modules.append("decoder_flags")
    flags = set()
    for module in modules:
        flags.update(_DEFINED.findall((_ROOT / "lingvo_gshard" / f"{module}.py").read_text()))
    return flags


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_exists(document):
    for program, flags in _commands(document.read_text()):
        assert set(flags) <= _defined(program), f"{document.name}: {program}"


def test_commands_and_flags_are_found():
    commands = list(_commands((_ROOT / "README.md").read_text()))
    assert len(commands) > 10 and "cluster" in _defined("trainer")
    given = {flag for _, flags in commands for flag in flags}
    assert {"model", "num_partitions", "cluster", "topology"} <= given
