"""The import rule: which file may import which, read from every file's syntax tree."""

import ast
import functools
import graphlib
import pathlib

_ROOT = pathlib.Path(__file__).parent.parent
_LIBRARY = "lingvo_gshard"

# The folders of the library in order: each may import some of those above it, and the registry,
# which imports core alone, if it says so. A new folder needs a line.
_ALLOWED = {
    "core": "",
    "files": "core",
    "sharding": "core",
    "layers": "core sharding",
    "optim": "core sharding",
    "beam_search": "core layers",
    "hlo": "core files",
    "spmd": "core files sharding hlo",
    "input": "core files sharding",
    "translation": "core files spmd input",
    "serving": "files translation",
    "model": "core sharding layers optim beam_search",
    "checkpoints": "core files sharding spmd",
    "train": "core files sharding spmd checkpoints model",
    "runs": "core files sharding spmd input translation model checkpoints train registry",
    "planning": "core files sharding layers optim hlo spmd input model train runs registry",
    "evaluation": "core files sharding spmd input translation model train runs planning",
}
_JAX = {"spmd", "checkpoints", "train", "runs"}
# What data_prep shares with the library: the formats of files, and what has no room of its own.
_SHARED = {
    f"{_LIBRARY}.cli",
    f"{_LIBRARY}.files.atomic_file",
    f"{_LIBRARY}.files.child_process",
    f"{_LIBRARY}.files.digests",
    f"{_LIBRARY}.files.json_records",
    f"{_LIBRARY}.files.storage",
    f"{_LIBRARY}.files.table",
    f"{_LIBRARY}.input.manifest",
    f"{_LIBRARY}.input.normalization",
    f"{_LIBRARY}.input.example_codec",
    f"{_LIBRARY}.spmd.environment",  # Which cli prepares.
}
_BINARIES = {"trainer.py", "translate.py", "plan.py", "compare.py"}
_MAX_INNER_IMPORTS = 5
_STANDARD = {"__future__", "ast", "collections", "copy", "difflib", "enum", "typing"}


def _files(*folders):
    found = [path for folder in folders for path in sorted((_ROOT / folder).rglob("*.py"))]
    assert found
    return [str(path.relative_to(_ROOT)) for path in found]


@functools.cache
def _tree(path):
    return ast.parse((_ROOT / path).read_text())


@functools.cache
def _imports(path):
    """Returns the dotted names of everything that a file imports, inside functions, too."""
    names = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _roots(path):
    return {name.split(".")[0] for name in _imports(path)}


def _folder(path):
    """Returns the library's folder that holds a file; None for a module at the top."""
    parts = pathlib.Path(path).parts
    return parts[1] if len(parts) > 2 else None


def _path_of(name):
    """Returns the file that a dotted name is, or is defined in; None if it isn't ours."""
    for dotted in (name, name.rpartition(".")[0]):
        path = dotted.replace(".", "/") + ".py"
        if (_ROOT / path).is_file():
            return path
    return None


def _loaded_by_name(path):
    """Returns the modules that a binary loads once the environment is prepared."""
    return [
        node.args[0].value
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cli.load"
    ]


_FILES = _files(_LIBRARY)
_SOURCE = _files(_LIBRARY, "data_prep", "params")


def test_the_walk_sees_imports():
    assert "tensorflow" in _imports(f"{_LIBRARY}/spmd/lowering.py")
    assert f"{_LIBRARY}.core.nested_map.NestedMap" in _imports(f"{_LIBRARY}/layers/moe.py")
    assert f"{_LIBRARY}.runs.modes" in _loaded_by_name(f"{_LIBRARY}/trainer.py")


def test_the_folders_stand_in_order():
    assert {_folder(path) for path in _FILES} - {None} == set(_ALLOWED)
    for i, (folder, allowed) in enumerate(_ALLOWED.items()):
        assert set(allowed.split()) <= {"registry", *list(_ALLOWED)[:i]}, folder
    assert [name for name in _imports(f"{_LIBRARY}/registry.py") if _LIBRARY in name] == [
        f"{_LIBRARY}.core.hyperparams",
        f"{_LIBRARY}.core.hyperparams.Params",
    ]


def test_a_folder_imports_only_what_stands_before_it():
    for path in _FILES:
        folder = _folder(path)
        for name in _imports(path):
            if folder and name.startswith(f"{_LIBRARY}."):
                assert name.split(".")[1] in [folder, *_ALLOWED[folder].split()], (path, name)


def test_no_files_import_each_other_in_a_circle():
    graph = {path: {_path_of(name) for name in _imports(path)} - {None} for path in _SOURCE}
    graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_few_imports_stand_inside_functions():
    inner = [
        f"{path}:{node.lineno}"
        for path in _SOURCE
        for function in ast.walk(_tree(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(inner) <= _MAX_INNER_IMPORTS, inner


def test_what_binaries_load_by_name_exists():
    for binary in _BINARIES:
        for name in _loaded_by_name(f"{_LIBRARY}/{binary}"):
            assert _path_of(f"{name}.x") == name.replace(".", "/") + ".py", (binary, name)


def test_only_rooms_with_devices_import_jax():
    for path in _FILES:
        if _folder(path) not in _JAX:
            assert not _roots(path) & {"jax", "jaxlib", "orbax"}, path


def test_the_lowest_modules_import_the_standard_library_alone():
    for name in ("hyperparams", "nested_map"):
        assert _roots(f"{_LIBRARY}/core/{name}.py") <= _STANDARD, name


def test_the_library_imports_neither_experiments_nor_preparation_nor_tests():
    for path in _FILES:
        assert not _roots(path) & {"params", "data_prep", "tests", "bench", "tools"}, path


def test_experiments_import_only_the_library():
    for path in _files("params"):
        assert _roots(path) <= {_LIBRARY, "params", "__future__"}, path


def test_preparation_shares_little_with_the_library():
    for path in _files("data_prep"):
        assert not _roots(path) & {"jax", "tensorflow", "params", "tests"}, path
        for name in _imports(path):
            if name.startswith(_LIBRARY):
                assert {name, name.rpartition(".")[0]} & _SHARED, (path, name)


def test_what_preparation_shares_loads_neither_tensorflow_nor_jax():
    for name in _SHARED:
        path = name.replace(".", "/") + ".py"
        assert not _roots(path) & {"tensorflow", "jax", "grain"}, path
        for inner in _imports(path):
            if inner.startswith(_LIBRARY):
                assert {inner, inner.rpartition(".")[0]} & _SHARED, (path, inner)


def test_only_binaries_define_and_read_flags():
    for path in _FILES:
        if pathlib.Path(path).name not in {*_BINARIES, "cli.py"}:
            assert "absl.flags" not in _imports(path), path


def test_modules_are_documented_and_named_after_something():
    for path in _SOURCE:
        assert ast.get_docstring(_tree(path)), path
        assert pathlib.Path(path).stem not in ("util", "utils", "helpers", "misc", "common")
        if path.endswith("__init__.py"):
            for node in _tree(path).body[1:]:
                assert isinstance(node, ast.Import | ast.ImportFrom), path
