"""Modules that are imported when one of their attributes is first used."""

import sys

import pytest

from lingvo_gshard.core.late import LateModule


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The name of a module that can be imported, but has not been."""
    name = "an_example_of_a_late_module"
    (tmp_path / f"{name}.py").write_text("values = [1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_module_is_imported_when_an_attribute_is_first_read(example):
    late = LateModule(example)
    assert late.__name__ == example and example not in sys.modules
    assert late.values == [1]
    assert late.values is sys.modules[example].values


def test_an_attribute_is_looked_up_once(example):
    late = LateModule(example)
    first = late.values
    del sys.modules[example].values
    assert late.values is first


def test_an_unknown_attribute_raises_the_modules_error(example):
    with pytest.raises(AttributeError, match=f"'{example}' has no attribute 'unknown'"):
        _ = LateModule(example).unknown


def test_a_missing_module_is_reported_when_it_is_used():
    late = LateModule("a_module_that_nobody_has")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        _ = late.anything
