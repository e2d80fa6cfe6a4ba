"""Writes the BUILD file of every folder from its modules' imports.

    python -m tools.build_files [--check]

A target a module: its dependencies are what it imports, no more and no less. Third-party
packages are not labels: they are the environment's, which requirements.txt pins.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pathlib
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
_FOLDERS = ("lingvo_gshard", "params", "data_prep", "bench", "tools", "tests")
# A package whose modules are found by name when the program runs, and who looks for them.
_DISCOVERED = {"lingvo_gshard.registry": "params"}
_RULES = ("py_binary", "py_library")
_HEADER = '"""Written by `python -m tools.build_files`; do not edit."""\n'
_PUBLIC = 'package(default_visibility = ["//visibility:public"])\n'
_CONFIGURATION = '\nexports_files(["pyproject.toml"])\n'
_ALL = '["**"], exclude = ["**/__pycache__/**"]'
_FILES = """
filegroup(
    name = "files",
    srcs = glob(%s)%s,
)
"""


@dataclasses.dataclass(frozen=True)
class Module:
    """A Python file.

    Attributes:
      name: dotted.
      path: from the root of the project.
      imports: dotted names of the project's modules that it imports when it is imported.
      late_imports: those that it imports inside functions.
      is_program: whether it runs as `python -m`.
      reads_files: whether it looks for other files of the project, or starts processes.
    """

    name: str
    path: pathlib.PurePosixPath
    imports: frozenset[str]
    late_imports: frozenset[str]
    is_program: bool
    reads_files: bool

    @property
    def is_test(self) -> bool:
        """Whether pytest collects it."""
        return self.path.stem.endswith("_test")

    @property
    def folder(self) -> str:
        """Where it lies."""
        return str(self.path.parent)


@dataclasses.dataclass(frozen=True)
class Graph:
    """The modules by name, and by name what each depends on.

    Attributes:
      modules: all of them.
      deps: the dependencies of each; acyclic.
      late: dependencies that would close a circle. Whatever runs and reaches their owner has them.
    """

    modules: dict[str, Module]
    deps: dict[str, frozenset[str]]
    late: dict[str, frozenset[str]]

    def reached(self, name: str) -> set[str]:
        """The modules that `name` depends on, itself included."""
        return _reached(self.deps, name)


def read(root: pathlib.Path) -> Graph:
    """The dependencies of all modules under `root`.

    Raises:
      ValueError: two modules import each other outside of functions.
    """
    paths = [path for folder in _FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    names = {_module_name(path.relative_to(root)): path for path in paths}
    modules = {name: _module(name, path, root, names) for name, path in names.items()}
    deps: dict[str, set[str]] = {name: set(m.imports) for name, m in modules.items()}
    for name in modules:
        deps[name] |= _packages(name, modules)
    for name in sorted(modules):
        for imported in sorted(deps[name]):
            if name in _reached(deps, imported):
                raise ValueError(f"{name} and {imported} import each other.")
    late: dict[str, set[str]] = {}
    for name, module in sorted(modules.items()):
        for imported in sorted(module.late_imports | _discovered(name, modules)):
            circle = name in _reached(deps, imported)
            (late.setdefault(name, set()) if circle else deps[name]).add(imported)
    return Graph(modules, _frozen(deps), _frozen(late))


def build_files(graph: Graph) -> dict[str, str]:
    """The text of every BUILD file by its folder; the root's is the empty name."""
    folders = {module.folder for module in graph.modules.values()}
    imported = frozenset().union(*graph.deps.values(), *graph.late.values())
    children = {folder: _children(folder, folders) for folder in folders | {""}}
    texts = {
        "": _HEADER + "\n" + _PUBLIC + _CONFIGURATION + _files('["*", "docs/**"]', children[""])
    }
    for folder in sorted(folders):
        modules = [m for _, m in sorted(graph.modules.items()) if m.folder == folder]
        rules = [rule for module in modules for rule in _rules(module, graph, imported)]
        texts[folder] = _load(rules) + _PUBLIC + "".join(rules) + _files(_ALL, children[folder])
    return texts


def main() -> None:
    """Writes the files, or with --check says which are not as they would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing; exit 1 if stale.")
    check = parser.parse_args().check
    texts = build_files(read(ROOT))
    stale = [
        folder
        for folder, text in texts.items()
        if not _path(folder).exists() or _path(folder).read_text() != text
    ]
    names = [str(_path(folder).relative_to(ROOT)) for folder in stale]
    if check and stale:
        sys.exit(f"{', '.join(names)}: not as the imports; run `python -m tools.build_files`.")
    for folder, name in zip(stale, names, strict=True):
        _path(folder).write_text(texts[folder])
        print(f"wrote {name}")


def _path(folder: str) -> pathlib.Path:
    return ROOT / folder / "BUILD"


def _module_name(path: pathlib.PurePath) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _module(
    name: str, path: pathlib.Path, root: pathlib.Path, names: dict[str, pathlib.Path]
) -> Module:
    tree = ast.parse(path.read_text())
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    unused = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = {True: set[str](), False: set[str]()}
    for node in ast.walk(tree):
        if node not in unused:
            found[node in inside] |= _imported(node, names)
    text = path.read_text()
    return Module(
        name=name,
        path=pathlib.PurePosixPath(path.relative_to(root)),
        imports=frozenset(found[False] - {name}),
        late_imports=frozenset(found[True] - found[False] - {name}),
        is_program='if __name__ == "__main__":' in text,
        reads_files="__file__" in text or "subprocess" in text,
    )


def _imported(node: ast.AST, names: Iterable[str]) -> set[str]:
    match node:
        case ast.Import():
            dotted = {alias.name for alias in node.names}
        case ast.ImportFrom(module=str(module)):
            # A module, or something of one.
            dotted = {
                full if (full := f"{module}.{alias.name}") in names else module
                for alias in node.names
            }
        case _:
            dotted = set()
    return dotted & set(names)


def _packages(name: str, names: Iterable[str]) -> set[str]:
    """The packages around a module, which Python imports before it."""
    parts = name.split(".")
    around = {".".join(parts[:i]) for i in range(1, len(parts))}
    return around & set(names)


def _discovered(name: str, names: Iterable[str]) -> set[str]:
    package = _DISCOVERED.get(name)
    return {other for other in names if package and other.startswith(package + ".")}


def _reached(deps: dict[str, set[str]] | dict[str, frozenset[str]], name: str) -> set[str]:
    reached, todo = set[str](), [name]
    while todo:
        now = todo.pop()
        if now not in reached:
            reached.add(now)
            todo += deps[now]
    return reached


def _frozen(deps: dict[str, set[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(each) for name, each in deps.items()}


def _children(folder: str, folders: set[str]) -> list[str]:
    """The nearest folders with a BUILD file below `folder`."""
    below = [f for f in folders if f != folder and (not folder or f.startswith(folder + "/"))]
    return sorted(f for f in below if not any(f.startswith(other + "/") for other in below))


def _files(patterns: str, children: list[str]) -> str:
    labels = "".join(f'\n        "//{child}:files",' for child in children)
    return _FILES % (patterns, f" + [{labels}\n    ]" if children else "")


def _load(rules: list[str]) -> str:
    used = [name for name in _RULES if any(rule.startswith(f"\n{name}(") for rule in rules)]
    lines = [_HEADER]
    if used:
        quoted = ", ".join(f'"{name}"' for name in used)
        lines.append(f'load("@rules_python//python:defs.bzl", {quoted})')
    if any(rule.startswith("\npytest_test(") for rule in rules):
        lines.append('load("//tools/bazel:pytest_test.bzl", "pytest_test")')
    return "\n".join(lines) + "\n\n"


def _rules(module: Module, graph: Graph, imported: frozenset[str]) -> list[str]:
    deps = graph.deps[module.name]
    runs = deps.union(*(graph.late.get(name, ()) for name in graph.reached(module.name)))
    if module.is_test:
        deps = runs | _conftests(module, graph)
        return [_rule("pytest_test", module, module.path.stem, deps, graph)]
    rules = []
    if module.is_program:
        rules.append(_rule("py_binary", module, module.path.stem, runs, graph))
    if not module.is_program or module.name in imported:
        rules.append(_rule("py_library", module, _library(module), deps, graph))
    return rules


def _conftests(test: Module, graph: Graph) -> set[str]:
    """What pytest reads besides: the conftest of the test's folder and of those above it."""
    return {
        name
        for name, module in graph.modules.items()
        if module.path.name == "conftest.py" and module.path.parent in test.path.parents
    }


def _library(module: Module) -> str:
    return module.path.stem + ("_lib" if module.is_program else "")


def _rule(kind: str, module: Module, name: str, deps: Iterable[str], graph: Graph) -> str:
    labels = sorted(_label(graph.modules[dep], module.folder) for dep in deps)
    lines = [f'    name = "{name}",', f'    srcs = ["{module.path.name}"],']
    if kind == "pytest_test" and _reads_files(module, graph):
        lines.append('    data = ["//:files"],')
    if len(labels) == 1:
        lines.append(f'    deps = ["{labels[0]}"],')
    elif labels:
        lines += ["    deps = [", *(f'        "{label}",' for label in labels), "    ],"]
    return "\n".join([f"\n{kind}(", *lines, ")\n"])


def _reads_files(test: Module, graph: Graph) -> bool:
    own = (graph.modules[name] for name in graph.reached(test.name) if name.startswith("tests."))
    return any(module.reads_files for module in own)


def _label(module: Module, folder: str) -> str:
    name = _library(module)
    return f":{name}" if module.folder == folder else f"//{module.folder}:{name}"


if __name__ == "__main__":
    main()
