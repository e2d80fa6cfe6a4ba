"""The registry of experiments."""

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
def test_an_unknown_name_names_the_nearest_and_lists_all(given):
    with pytest.raises(ValueError, match=f"No model '{given}'.*toy.Dense4L") as error:
        registry.get_class(given)
    assert "Did you mean toy.MoE8E" in str(error.value) and "\n" not in str(error.value)


def test_what_resembles_nothing_is_guessed_at_by_nobody():
    with pytest.raises(ValueError, match="No model 'qqq'. Registered are ") as error:
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


def test_the_library_knows_no_experiment_until_it_is_asked():
    code = (
        "from lingvo_gshard.spmd import environment; environment.prepare()\n"
        "import sys; from lingvo_gshard import registry; from lingvo_gshard.runs import run\n"
        "assert not [name for name in sys.modules if name.startswith('params')]\n"
        "assert registry.registered_names() and 'params.toy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_stacks_width_is_that_of_the_task():
    with pytest.raises(ValueError, match=r"task.encoder.dim cannot be set; the program fills it"):
        registry.get_params("toy.MoE8E4L", ["task.encoder.dim=256"])
