"""The commands, flags and settings that the documents show exist."""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

from lingvo_gshard import registry

_ROOT = pathlib.Path(__file__).parents[2]
_PAGES = sorted(
    [
        *_ROOT.glob("*.md"),
        *(_ROOT / "docs").glob("*.md"),
        *(_ROOT / "bench").glob("*.md"),
        *(_ROOT / "repro").rglob("*.md"),
        *(_ROOT / "tools").glob("*.md"),
        _ROOT / "examples/partitioner_faults/README.md",
    ]
)
_SCRIPTS = sorted((_ROOT / "launch").iterdir())
_SOURCES = sorted(
    [
        *(_ROOT / "lingvo_gshard").glob("*.py"),
        *(_ROOT / "xla_plan").glob("*_program.py"),
        _ROOT / "repro/plan_tables.py",
        _ROOT / "data_prep/build.py",
    ]
)
_WITHOUT_COMMANDS = {
    "CONTRIBUTING.md",
    "docs/api.md",
    "docs/estimator.md",
    "docs/results.md",
}

_MODULE = re.compile(r"-m ((?:lingvo_gshard|data_prep|bench|repro|tools)(?:\.[a-z_\d]+)+)")
_GSHARD = re.compile(r"(?<![\w./])gshard (plan [a-z_]+|(?!plan\b)[a-z]+)\b")
_SLURM = re.compile(r"launch/slurm\.sbatch\b")
_FLAG = re.compile(r"(?<!\S)--([\w-]+)")
_DEFINED = re.compile(r'(?:DEFINE_\w+|_\w+Flag)\(\s*"(\w+)"')
_SETTING = re.compile(r"((?:train|task|input|eval_input|decode|optimizer)\.[\w.]+)(?==|$)")
_SET = re.compile(r"--set=([\w.]+)=")
_WITH_PROGRAMS = ("bench", "repro", "repro.quality", "tools", "lingvo_gshard", "xla_plan")
# Every program has absl's flags.
_ABSL = {"help", "verbosity"}
# Flags of sbatch, xpk, docker and bazel that a document names by themselves.
_OTHERS = {"signal", "max-restarts", "build-arg", "config", "enable_workspace"}


def _code(document: pathlib.Path) -> list[str]:
    """The pieces of code in a document: lines of blocks, with their continuations, and spans."""
    text = document.read_text()
    if document.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    text = text.replace("\\\n", " ")
    if document.suffix == ".yaml":
        # The items of a list are the words of a command.
        return re.sub(r"\n\s*- (?=\S+\n)", " ", text).splitlines()
    if document.suffix != ".md":
        return text.splitlines()

    pieces, prose, is_fenced = [], [], False
    for line in text.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            pieces.append(line)
        else:
            prose.append(line)
    spans = re.findall(r"`([^`]+)`", " ".join(prose))
    return pieces + spans


def _commands(document: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the module and the flags of each command in a document."""
    for piece in _code(document):
        for part in re.split(r" # |#SBATCH|;|&&| \| ", piece):
            if found := _SLURM.search(part):
                yield "lingvo_gshard.trainer", _FLAG.findall(part, found.end())
            elif found := _MODULE.search(part):
                yield found[1], _FLAG.findall(part, found.end())
            elif found := _GSHARD.search(part):
                yield _modules_of_gshard()[found[1]], _FLAG.findall(part, found.end())


def _file(module: str) -> pathlib.Path:
    path = _ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _modules_of_gshard() -> dict[str, str]:
    programs = _named_in("lingvo_gshard.gshard")
    of_plan = _named_in(programs.pop("plan"))
    return programs | {f"plan {name}": module for name, module in of_plan.items()}


def _named_in(module: str) -> dict[str, str]:
    """The modules of a command that runs other programs, by their names."""
    source = _file(module).read_text()
    return dict(re.findall(r'^    "(\w+)": "([\w.]+)",$', source, re.MULTILINE))


@functools.cache
def _defined(module: str) -> frozenset[str]:
    """The flags of a module, and of the modules that it imports from folders with programs."""
    source = _file(module).read_text()
    flags = set(_DEFINED.findall(source))
    if "cli.define_devices()" in source:
        flags |= set(_DEFINED.findall(_file("lingvo_gshard.cli").read_text())) - {"import"}
    if "cli.define_imports()" in source:
        flags.add("import")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in _WITH_PROGRAMS:
            for name in node.names:
                imported = f"{node.module}.{name.name}"
                if name.name != "cli" and _file(imported).exists():
                    flags |= _defined(imported)
    return frozenset(flags)


@functools.cache
def _all_flags() -> frozenset[str]:
    flags = set(_ABSL | _OTHERS)
    folders = ("lingvo_gshard", "xla_plan", "data_prep", "repro", "repro/quality", "repro/recipes")
    for folder in (*folders, "bench", "tools", "tools/fuzz_programs"):
        for source in (_ROOT / folder).glob("*.py"):
            flags.update(_DEFINED.findall(source.read_text()))
    # Those of booleans have a negation.
    return frozenset(flags | {f"no{flag}" for flag in flags})


@pytest.mark.parametrize("document", [*_PAGES, *_SCRIPTS, *_SOURCES], ids=lambda path: path.name)
def test_every_flag_of_a_command_exists(document):
    for module, flags in _commands(document):
        unknown = set(flags) - _defined(module) - _ABSL
        assert not unknown, f"{document.name}: {module} has no {unknown}"


@pytest.mark.parametrize("document", _PAGES, ids=lambda path: path.name)
def test_every_flag_that_stands_alone_exists(document):
    for piece in _code(document):
        if piece.startswith("--") and not piece.startswith("--xla_"):
            unknown = set(_FLAG.findall(piece)) - _all_flags()
            assert not unknown, f"{document.name}: {piece}"


@pytest.mark.parametrize("document", _PAGES, ids=lambda path: path.name)
def test_every_setting_exists(document):
    names = ("toy.MoE8E4L", "toy.LmMoE8E4L", "open_moe.HyMT2MoE30B")
    tasks = [registry.get_params(name) for name in names]
    for piece in _code(document):
        for word in piece.split():
            found = _SET.match(word) or _SETTING.match(word)
            if found and found[1] != "path" and not found[1].endswith(".py"):
                assert any(_has(params, found[1]) for params in tasks), f"{document.name}: {word}"


def _has(params, setting):
    try:
        params.Get(setting)
    except (AttributeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("document", [*_PAGES, *_SCRIPTS], ids=lambda path: path.name)
def test_a_document_has_commands(document):
    has_commands = any(True for _ in _commands(document))
    name = str(document.relative_to(_ROOT))
    assert has_commands == (name not in _WITHOUT_COMMANDS)


def test_every_program_is_documented():
    shown = {module for page in _PAGES for module, _ in _commands(page)}
    assert set(_modules_of_gshard().values()) <= shown


def test_flags_of_each_program_are_found():
    assert {"model", "cluster", "num_partitions"} <= _defined("lingvo_gshard.trainer")
    assert {"port", "bundle", "platform"} <= _defined("lingvo_gshard.serve")
    assert "from_bundle" in _defined("lingvo_gshard.export_bundle")
    assert "cluster" not in _defined("lingvo_gshard.compare")
    assert {"input", "engine"} <= _defined("data_prep.build")
    assert "port" not in _defined("lingvo_gshard.translate")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    gshard train --logdir=RUN\n", [("lingvo_gshard.trainer", ["logdir"])]),
        (
            "`gshard plan model \\\n    --model=M` prints it\n",
            [("lingvo_gshard.plan_model", ["model"])],
        ),
        (
            "```\nsbatch --nodes=4 launch/slurm.sbatch --model=M  # and --more\n```\n",
            [("lingvo_gshard.trainer", ["model"])],
        ),
        ("gshard plan model --model=M is prose\n", []),
    ],
)
def test_commands_are_found(text, expected, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(_commands(page)) == expected
