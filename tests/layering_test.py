"""The import rule: who may know whom, read off every file's syntax tree."""

import ast
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_LIBRARY = "lingvo_gshard"

# What each folder of the library may import of it, besides itself. A new folder needs a line.
_ALLOWED = {
    "core": set(),
    "sharding": {"core"},
    "layers": {"core", "sharding"},
    "optim": {"core", "sharding"},
    "hlo": {"core"},
    "spmd": {"core", "sharding", "hlo"},
    "input": {"core", "sharding"},
    "decode": {"core", "sharding", "layers", "input", "spmd"},
    "serving": {"core", "decode"},
    "model": {"core", "sharding", "layers", "optim", "decode"},
    "train": {"core", "sharding", "layers", "spmd", "input", "decode", "model"},
    "evaluation": {"core", "sharding", "spmd", "input", "decode", "model", "train"},
    "planning": {
        "core",
        "sharding",
        "layers",
        "optim",
        "hlo",
        "spmd",
        "input",
        "model",
        "train",
    },
}
_JAX = {"spmd", "train", "input"}
_FORMATS = {
    f"{_LIBRARY}.cli",
    f"{_LIBRARY}.core.atomic_file",
    f"{_LIBRARY}.core.table",
    f"{_LIBRARY}.input.manifest",
    f"{_LIBRARY}.input.example_codec",
}
# Of data_prep, the one module that tokenizes inside tf.data.
_TOKENIZATION = "data_prep/encoding.py"
_FLAGS = {"trainer.py", "compare.py", "plan.py"}


def _files(*folders):
    found = [path for folder in folders for path in sorted((_ROOT / folder).rglob("*.py"))]
    assert found
    return [str(path.relative_to(_ROOT)) for path in found]


def _tree(path):
    return ast.parse((_ROOT / path).read_text())


def _imports(path):
    """Dotted names of all that a file imports, functions' and type checkers' imports included."""
    names = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _folder(path):
    """The library's folder that a file lies in; None for a module at its top."""
    parts = pathlib.Path(path).parts
    return parts[1] if len(parts) > 2 else None


def _is_package(name):
    return (_ROOT / _LIBRARY / name).is_dir()


_FILES = _files(_LIBRARY)
_IN_FOLDERS = [path for path in _FILES if _folder(path)]


def test_the_walk_sees_imports():
    assert "tensorflow" in _imports(f"{_LIBRARY}/layers/moe.py")
    assert f"{_LIBRARY}.core.nested_map.NestedMap" in _imports(f"{_LIBRARY}/layers/moe.py")
    assert f"{_LIBRARY}.train.run" in _imports(f"{_LIBRARY}/trainer.py")  # Inside a function.


def test_every_folder_has_its_line():
    assert {_folder(path) for path in _IN_FOLDERS} == set(_ALLOWED)


def test_the_table_has_no_circle():
    """Each folder stands after all that it may import."""
    order = list(_ALLOWED)
    for folder, allowed in _ALLOWED.items():
        late = {name for name in allowed if order.index(name) > order.index(folder)}
        assert not late, (folder, late)
    reached = {}
    for folder in ("core", "sharding", "layers", "model"):
        assert not set(reached) - _ALLOWED[folder], folder
        reached[folder] = True


@pytest.mark.parametrize("path", _IN_FOLDERS)
def test_a_folder_imports_only_what_lies_below_it(path):
    folder = _folder(path)
    for name in _imports(path):
        if name.split(".")[0] == _LIBRARY:
            assert name.split(".")[1] in _ALLOWED[folder] | {folder}, f"{path} imports {name}"


@pytest.mark.parametrize("path", _FILES)
def test_jax_is_known_where_devices_are(path):
    if _folder(path) not in _JAX:
        roots = {name.split(".")[0] for name in _imports(path)}
        assert not roots & {"jax", "jaxlib", "orbax"}, path


@pytest.mark.parametrize("name", ["hyperparams", "nested_map"])
def test_the_lowest_modules_import_the_standard_library_alone(name):
    roots = {name.split(".")[0] for name in _imports(f"{_LIBRARY}/core/{name}.py")}
    assert roots <= {"__future__", "collections", "copy", "difflib", "enum", "typing"}


@pytest.mark.parametrize("path", _FILES)
def test_the_registry_alone_finds_experiments(path):
    found = [name for name in _imports(path) if name.split(".")[0] in ("params", "tests")]
    assert found == (["params"] if path == f"{_LIBRARY}/registry.py" else []), path
    assert "data_prep" not in {name.split(".")[0] for name in _imports(path)}, path


@pytest.mark.parametrize("path", _files("params"))
def test_experiments_are_numbers_for_the_library(path):
    for name in _imports(path):
        root, *rest = name.split(".")
        assert root in (_LIBRARY, "params", "__future__"), f"{path} imports {name}"
        if root == _LIBRARY:
            assert rest[0] == "registry" or _is_package(rest[0]), f"{path} imports {name}"


@pytest.mark.parametrize("path", _files("data_prep"))
def test_preparation_shares_the_files_formats_alone(path):
    for name in _imports(path):
        root = name.split(".")[0]
        assert root not in ("jax", "params", "tests"), f"{path} imports {name}"
        if path != _TOKENIZATION:
            assert root not in ("tensorflow", "tensorflow_text"), f"{path} imports {name}"
        if root == _LIBRARY:
            assert any(name == f or name.startswith(f + ".") for f in _FORMATS), name


@pytest.mark.parametrize("name", sorted(_FORMATS))
def test_the_formats_load_neither_tensorflow_nor_jax(name):
    path = name.replace(".", "/") + ".py"
    roots = {name.split(".")[0] for name in _imports(path)}
    assert not roots & {"tensorflow", "jax", "grain"}
    inner = [name for name in _imports(path) if name.startswith(_LIBRARY)]
    assert all(any(n == f or n.startswith(f + ".") for f in _FORMATS) for n in inner), inner


@pytest.mark.parametrize("path", _FILES)
def test_flags_are_defined_and_read_in_binaries(path):
    uses = {
        node.attr
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "flags"
    }
    if "absl.flags" in _imports(path) and pathlib.Path(path).parts[1:] not in {
        (name,) for name in _FLAGS
    }:
        assert uses <= {"FlagHolder"}, path  # A type; what holds a flag hands it on.


@pytest.mark.parametrize("path", _files(_LIBRARY, "data_prep", "params"))
def test_an_init_defines_nothing_and_no_file_is_called_utils(path):
    assert pathlib.Path(path).stem not in ("util", "utils", "helpers", "misc", "common")
    if path.endswith("__init__.py"):
        for node in _tree(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert docstring or isinstance(node, ast.Import | ast.ImportFrom), path


@pytest.mark.parametrize("path", _files(_LIBRARY, "data_prep", "params"))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(_tree(path)), path
