"""The registry of experiments."""

import importlib.metadata
import subprocess
import sys

import pytest

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params


def test_names_are_module_and_class():
    names = registry.registered_names()
    assert names == sorted(names) and {"toy.MoE8E4L", "small.MoE8E6L"} <= set(names)
    assert registry.get_class("toy.MoE8E4L").__name__ == "MoE8E4L"
    assert isinstance(registry.get_params("toy.MoE8E4L"), Params)


@pytest.mark.parametrize("given", ["toy.MoE8E4", "toy.moe8e4l", "MoE8E4L"])
def test_an_unknown_name_names_the_nearest(given):
    with pytest.raises(ValueError, match=f"No model '{given}'. Did you mean toy.MoE8E") as error:
        registry.get_class(given)
    assert "toy.Dense4L" not in str(error.value)  # It lists no others.


def test_a_class_is_not_a_name():
    with pytest.raises(ValueError, match="model: expected a name, such as .*, got <class"):
        registry.get_class(type("Mine", (), {}))


def test_an_unlike_name_has_no_suggestion():
    with pytest.raises(ValueError, match="No model 'qqq'. `gshard models` lists them") as error:
        registry.get_class("qqq")
    assert "Did you mean" not in str(error.value)


def test_a_name_is_taken_once():
    def made():
        return type("Twice", (), {"__module__": "params.registry_test_only"})

    first = made()
    try:
        assert registry.register(first) is first
        assert registry.register(first) is first  # A module that is loaded again.
        with pytest.raises(ValueError, match="'registry_test_only.Twice' is registered already"):
            registry.register(made())
    finally:
        del registry._experiments["registry_test_only.Twice"]


_MINE = """
from lingvo_gshard import registry
from params import toy

@registry.register
class Mine(toy.MoE8E4L):
    NUM_EXPERTS = 16

class Plain(toy.MoE8E4L):
    MAX_STEPS = 7

def helper(): pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a package of a user's own."""
    package = tmp_path / "registry_test_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "own.py").write_text(_MINE)
    (package / "broken.py").write_text("import registry_test_is_not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("registry_test_package")]:
        del sys.modules[name]
    registry._experiments.pop("own.Mine", None)


def test_an_experiment_of_the_current_folder_has_a_path(folder):
    assert registry.get_params("registry_test_package.own.Plain").train.max_steps == 7
    assert registry.get_class("own.Mine").NUM_EXPERTS == 16  # By now it is registered.
    assert registry.full_name("own.Mine") == "registry_test_package.own.Mine"
    assert registry.full_name("toy.MoE8E4L") == "toy.MoE8E4L"


def test_a_module_is_imported_for_its_registrations(folder):
    with pytest.raises(ValueError, match=f"--import=own: there is no module own in {folder} or"):
        registry.import_modules(["own"])
    registry.import_modules(["registry_test_package.own"])
    assert "own.Mine" in registry.registered_names()

    (folder / "registry_test_package/unfinished.py").write_text("x = 1\nclass\n")
    with pytest.raises(ValueError, match="/unfinished.py, line 2: invalid syntax"):
        registry.import_modules(["registry_test_package.unfinished"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("registry_test_package.none.Mine", "And there is no module registry_test_package.none in"),
        (
            "registry_test_package.own.Min",
            r"defines no class Min with params\(\); its .* Mine, Plain",
        ),
        ("registry_test_package.own.helper", r"defines no class helper with params\(\)"),
        ("..Mine", "No model '..Mine'. `gshard models` lists"),
    ],
)
def test_a_wrong_path_lists_the_existing_names(folder, name, message):
    with pytest.raises(ValueError, match=message):
        registry.get_class(name)


def test_an_own_module_that_lacks_a_package_shows_which(folder):
    message = "/broken.py, line 1: ModuleNotFoundError: No .*'registry_test_is_not_installed'$"
    with pytest.raises(ValueError, match=message):
        registry.get_class("registry_test_package.broken.Mine")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("\n1 / 0\n", "/faulty.py, line 2: ZeroDivisionError: division by zero$"),
        ("int('x')\n", "/faulty.py, line 1: ValueError: invalid literal for int"),
        ("{}        return p.foo\n", "/faulty.py, line 5: NameError: name 'p' is not defined"),
        (
            "{}        return super().Task().Set(dims=3)\n",
            "/faulty.py, line 5: AttributeError: No hyperparameter 'dims'; did you mean dim",
        ),
        ("{}        super().Task()\n", r"Mine.Task\(\) returns None; expected .* by `return p`\.$"),
    ],
)
def test_an_error_in_an_own_module_is_one_line_with_its_place(folder, code, message):
    begin = "from params import toy\n\nclass Mine(toy.MoE8E4L):\n    def Task(self):\n"
    (folder / "registry_test_package/faulty.py").write_text(code.format(begin))
    with pytest.raises(ValueError, match=message) as raised:
        registry.get_params("registry_test_package.faulty.Mine")
    assert "\n" not in str(raised.value)


def test_installed_packages_name_their_modules_as_entry_points(folder, monkeypatch, caplog):
    points = []
    for name in ("own", "broken"):
        value = f"registry_test_package.{name}"
        point = importlib.metadata.EntryPoint(name, value, "lingvo_gshard.experiments")
        points += [point, point]
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.syspath_prepend(str(folder))
    assert "own.Mine" in registry.registered_names()
    (warning,) = caplog.messages
    assert warning.startswith("registry_test_package.broken, the entry point broken of lingvo_gsh")


def test_the_library_knows_no_experiment_until_it_is_asked():
    code = (
        "from xla_spmd.runtime import environment; environment.prepare()\n"
        "import sys; from lingvo_gshard import registry; from lingvo_gshard.runs import run\n"
        "assert not [name for name in sys.modules if name.startswith('params')]\n"
        "assert registry.registered_names() and 'params.toy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_width_of_a_stack_cannot_be_set():
    with pytest.raises(ValueError, match=r"task.encoder.dim cannot be set; the program fills it"):
        registry.get_params("toy.MoE8E4L", ["task.encoder.dim=256"])
