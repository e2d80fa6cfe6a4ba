"""The import rule: which file may import which, read from every file's syntax tree."""

import ast
import functools
import graphlib
import pathlib
import sys

_ROOT = pathlib.Path(__file__).parent.parent
_LIBRARY = "lingvo_gshard"

# The folders of the library in order, with the imports of each. Bazel reads the same file.
_ROOMS_FILE = _ROOT / _LIBRARY / "rooms.bzl"
_JAX = {"spmd", "checkpoints", "train", "runs", "plans"}
# The modules that data_prep shares with the library: formats of files, and modules outside rooms.
_SHARED = {
    f"{_LIBRARY}.cli",
    f"{_LIBRARY}.files.git_lfs",
    f"{_LIBRARY}.files.json_fields",
    f"{_LIBRARY}.files.text_file",
    f"{_LIBRARY}.input.bpe_tokenizer",
    f"{_LIBRARY}.input.manifest",
    f"{_LIBRARY}.input.normalization",
    f"{_LIBRARY}.input.example_codec",
    f"{_LIBRARY}.input.fairseq_tokens",
    f"{_LIBRARY}.input.fairseq_vocabulary",
    f"{_LIBRARY}.input.tokenizer",
}
_SHARED_ROOMS = ("xla_spmd.files.", "xla_spmd.runtime.")
# The programs, and their shared modules. They parse flags, so that a mistake is reported
# before the modules that compute are imported, in functions.
_PROGRAMS = {
    "cli.py",
    "compare.py",
    "completion.py",
    "decoder_flags.py",
    "experiment_flags.py",
    "export_bundle.py",
    "generate.py",
    "gshard.py",
    "import_model.py",
    "line_program.py",
    "list_models.py",
    "list_settings.py",
    "plan_compare.py",
    "plan_flags.py",
    "plan_machines.py",
    "plan_model.py",
    "plan_programs.py",
    "plan_search.py",
    "prune.py",
    "serve.py",
    "trainer.py",
    "translate.py",
}
# The planner's programs, and the frame of all programs.
_PLANNERS = {
    "xla_plan/calibrate.py",
    "xla_plan/plan_program.py",
    "xla_plan/program_flags.py",
    "xla_plan/search_program.py",
    "xla_spmd/runtime/command_line.py",
    "xla_spmd/runtime/usage.py",
}
# What a program may import at its top: nothing of it loads JAX, TensorFlow or Grain.
_QUICK = {
    "__version__",
    "cli",
    "core",
    "decoder_flags",
    "decoding",
    "experiment_flags",
    "files",
    "input",
    "line_program",
    "plan_flags",
    "registry",
    "runs",
}
_QUICK_MODULES = {
    f"{_LIBRARY}.decoding.outcomes",
    f"{_LIBRARY}.decoding.reading",
    f"{_LIBRARY}.input.example_codec",
    f"{_LIBRARY}.input.fairseq_tokens",
    f"{_LIBRARY}.input.fairseq_vocabulary",
    f"{_LIBRARY}.input.tokenizer",
    f"{_LIBRARY}.input.bpe_tokenizer",
    f"{_LIBRARY}.input.manifest",
    f"{_LIBRARY}.runs.launch",
    f"{_LIBRARY}.runs.opening",
}
# Other functions that import, and why.
_INNER_IMPORTS = {
    "data_prep/engines.py": "Dask is optional",
    "data_prep/multilingual.py": "TensorFlow Datasets is optional, and loads TensorFlow",
    "data_prep/report.py": "Matplotlib takes half a second, which a mistake need not wait",
    "xla_spmd/hlo/hlo_proto.py": "protobuf is needed only where a compiled program is read",
    f"{_LIBRARY}/api/devices.py": "a mistake is reported before JAX is imported",
    f"{_LIBRARY}/api/experiment.py": "a mistake is reported before JAX is imported",
    f"{_LIBRARY}/api/loading.py": "the devices are prepared before JAX is imported",
    f"{_LIBRARY}/api/plans.py": "its greetings are kept from standard error",
    f"{_LIBRARY}/api/results.py": "Matplotlib takes half a second, which notebooks alone need",
    f"{_LIBRARY}/input/bpe_tokenizer.py": "Jinja is optional",
    f"{_LIBRARY}/runs/opening.py": "a mistake is reported before JAX is imported",
    f"{_LIBRARY}/spmd/coordination.py": "processes import it without JAX's service",
    "xla_spmd/runtime/progress.py": "a widget needs packages of notebooks",
    "xla_spmd/runtime/environment.py": "it prepares what JAX reads when it is imported",
    f"{_LIBRARY}/spmd/lowering.py": "jax2tf loads TensorFlow",
    f"{_LIBRARY}/spmd/tracer.py": "TensorFlow, in the process that traces",
    f"{_LIBRARY}/train/writers.py": "TensorBoard takes 0.2 s, and the others are optional",
}
# Rooms with public names, each of which is imported when it is first used.
_WITH_LATE_NAMES = {f"{_LIBRARY}/__init__.py", "xla_plan/__init__.py"}
_TENSORFLOW = {"core/late.py", "core/tf_private.py", "spmd/tracer.py"}
_HEAVY = {"jax", "tensorflow", "grain", "orbax", "matplotlib"}
# What requirements/plan.txt installs.
_LIGHT = {"absl", "etils", "google", "jax", "jaxlib", "ml_dtypes", "numpy", "tqdm"}
_STANDARD = {
    "__future__",
    "ast",
    "collections",
    "copy",
    "dataclasses",
    "difflib",
    "enum",
    "inspect",
    "math",
    "numbers",
    "types",
    "typing",
}


def _rules():
    """Returns the values that rooms.bzl assigns by name; Starlark's literals are Python's."""
    _, *assignments = ast.parse(_ROOMS_FILE.read_text()).body
    return {each.targets[0].id: ast.literal_eval(each.value) for each in assignments}


_ALLOWED = _rules()["ROOMS"]
_PACKAGES = _rules()["PACKAGES"]


def _files(*folders):
    found = [path for folder in folders for path in sorted((_ROOT / folder).rglob("*.py"))]
    assert found
    return [str(path.relative_to(_ROOT)) for path in found]


@functools.cache
def _tree(path):
    return ast.parse((_ROOT / path).read_text())


def _names(nodes, path):
    """Returns the dotted names of everything that some nodes of a file import."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@functools.cache
def _imports(path):
    """Returns the dotted names of everything that a file imports, inside functions, too."""
    return _names(ast.walk(_tree(path)), path)


@functools.cache
def _top_imports(path):
    """Returns the dotted names of the modules that are imported together with a file."""
    return _names(_tree(path).body, path)


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


_FILES = _files(_LIBRARY)
_BELOW = _files(*_PACKAGES)
_SOURCE = [*_FILES, *_BELOW, *_files("data_prep", "params")]


def test_the_walk_sees_imports():
    assert "jax.experimental.jax2tf" in _imports(f"{_LIBRARY}/spmd/lowering.py")
    assert "jax.experimental.jax2tf" not in _top_imports(f"{_LIBRARY}/spmd/lowering.py")
    assert f"{_LIBRARY}.core.nested_map.NestedMap" in _imports(f"{_LIBRARY}/layers/moe.py")
    assert f"{_LIBRARY}.runs.modes" in _imports(f"{_LIBRARY}/trainer.py")


def test_the_folders_are_in_order():
    assert {_folder(path) for path in _FILES} - {None} == set(_ALLOWED)
    for i, (folder, allowed) in enumerate(_ALLOWED.items()):
        assert set(allowed) <= {"registry", *_PACKAGES, *list(_ALLOWED)[:i]}, folder
    assert [name for name in _imports(f"{_LIBRARY}/registry.py") if _LIBRARY in name] == [
        f"{_LIBRARY}.core.hyperparams",
        f"{_LIBRARY}.core.hyperparams.Params",
    ]


def test_a_folder_imports_only_earlier_folders():
    for path in _FILES:
        folder = _folder(path)
        for name in _imports(path):
            root, *rest = name.split(".")
            if folder and root == _LIBRARY:
                assert rest[0] in [folder, *_ALLOWED[folder]], (path, name)
            if folder and root in _PACKAGES:
                assert root in _ALLOWED[folder], (path, name)


def test_the_packages_below_know_nothing_of_the_library():
    ours = {_LIBRARY, "params", "data_prep", "repro", "bench", "tools", "tests"}
    for path in _BELOW:
        package = path.split("/")[0]
        packages = _roots(path) & {*ours, *_PACKAGES}
        assert packages <= {package, *_PACKAGES[package]}, path
        others = {name.split(".")[0] for name in _top_imports(path)} - {*_PACKAGES}
        assert others <= _LIGHT | sys.stdlib_module_names, path


def test_no_files_import_each_other_in_a_circle():
    graph = {path: {_path_of(name) for name in _imports(path)} - {None} for path in _SOURCE}
    graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_only_programs_and_exceptions_with_a_reason_import_inside_functions():
    inner = {path for path in _SOURCE if len(_imports(path)) > len(_top_imports(path))}
    typed = {path for path in inner if "TYPE_CHECKING" in (_ROOT / path).read_text()}
    programs = {f"{_LIBRARY}/{name}" for name in _PROGRAMS} | _PLANNERS
    # Imports for type checkers alone load nothing.
    assert inner - typed - programs <= _INNER_IMPORTS.keys()
    assert _INNER_IMPORTS.keys() <= inner


def test_imports_at_the_top_of_a_program_are_quick():
    for name in sorted(_PROGRAMS - {"compare.py"}):  # It computes nothing on devices.
        for imported in _top_imports(f"{_LIBRARY}/{name}"):
            if imported.startswith("xla_spmd."):
                assert imported.startswith(_SHARED_ROOMS), (name, imported)
                continue
            if not imported.startswith(f"{_LIBRARY}."):
                assert imported.split(".")[0] not in _HEAVY, (name, imported)
                continue
            room = imported.split(".")[1]
            assert room in _QUICK, (name, imported)
            if room in ("decoding", "input", "runs"):
                assert imported in _QUICK_MODULES, (name, imported)


def test_no_room_imports_a_program():
    names = {pathlib.Path(path).name for path in _FILES if _folder(path) is None}
    assert names == _PROGRAMS | {"__init__.py", "registry.py"}
    for path in _FILES:
        if _folder(path) is not None:
            for program in _PROGRAMS:
                module = f"{_LIBRARY}.{program.removesuffix('.py')}"
                assert not any(
                    name == module or name.startswith(f"{module}.") for name in _imports(path)
                ), (path, program)


def test_tensorflow_is_imported_only_for_tracing():
    for path in _SOURCE:
        if path not in {f"{_LIBRARY}/{name}" for name in _TENSORFLOW}:
            assert "tensorflow" not in _roots(path), path


def test_only_rooms_with_devices_import_jax():
    for path in _FILES:
        if _folder(path) not in _JAX:
            assert not _roots(path) & {"jax", "jaxlib", "orbax"}, path


def test_the_lowest_modules_import_only_the_standard_library():
    for name in ("definitions", "nested_map"):
        assert _roots(f"{_LIBRARY}/core/{name}.py") <= _STANDARD, name
    params = f"{_LIBRARY}/core/hyperparams.py"
    assert _roots(params) <= {*_STANDARD, _LIBRARY}
    ours = {_path_of(name) for name in _imports(params)} - {None}
    assert ours == {f"{_LIBRARY}/core/definitions.py"}


def test_the_library_imports_neither_experiments_nor_preparation_nor_tests():
    for path in _FILES:
        assert not _roots(path) & {"params", "data_prep", "tests", "bench", "repro", "tools"}, path


def test_experiments_import_only_the_library():
    for path in _files("params"):
        assert _roots(path) <= {_LIBRARY, "xla_spmd", "params", "__future__"}, path


def test_preparation_shares_little_with_the_library():
    for path in _files("data_prep"):
        assert not _roots(path) & {"jax", "tensorflow", "params", "tests"}, path
        for name in _imports(path):
            if name.startswith(_LIBRARY):
                assert {name, name.rpartition(".")[0]} & _SHARED, (path, name)
            if name.startswith("xla_"):
                assert name.startswith(_SHARED_ROOMS), (path, name)


def test_modules_shared_with_preparation_load_neither_tensorflow_nor_jax():
    for name in _SHARED:
        path = name.replace(".", "/") + ".py"
        assert not {name.split(".")[0] for name in _top_imports(path)} & _HEAVY, path
        for inner in _top_imports(path):
            if inner.startswith(_LIBRARY):
                assert {inner, inner.rpartition(".")[0]} & _SHARED, (path, inner)


def test_only_binaries_define_and_read_flags():
    for path in _FILES:
        if pathlib.Path(path).name not in _PROGRAMS:
            assert "absl.flags" not in _imports(path), path
    for path in _BELOW:
        if path not in _PLANNERS:
            assert "absl.flags" not in _imports(path), path


def test_modules_are_documented_and_named_after_something():
    for path in _SOURCE:
        assert ast.get_docstring(_tree(path)), path
        assert pathlib.Path(path).stem not in ("util", "utils", "helpers", "misc", "common")
        if path.endswith("__init__.py") and path not in _WITH_LATE_NAMES:
            for node in _tree(path).body[1:]:
                assert isinstance(node, ast.Import | ast.ImportFrom), path
