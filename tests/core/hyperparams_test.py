"""Params: definitions, errors, copies, text."""

import enum
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from lingvo_gshard.core import hyperparams, settings
from lingvo_gshard.core.hyperparams import (
    REQUIRED,
    BaseParams,
    InstantiableParams,
    Params,
    setting,
)


class _Color(enum.Enum):
    RED = "red"


class _Lamp:
    def __init__(self, params, *args):
        self.params, self.args = params, args


class _Typed(BaseParams):
    num_layers: int = setting(REQUIRED, "L.")
    rate: float | None = setting(None, "The rate.")
    is_fast: bool = setting(True, "Fast.")
    color: _Color = setting(_Color.RED, "The color.")
    languages: tuple[str, ...] = setting((), "Codes.")
    name: str = setting("", "A name.")
    inner: Params = setting(Params(), "A group.")


def _lamp():
    p = InstantiableParams(_Lamp)
    p.Define("watts", 60, "Power.")
    p.Define("color", _Color.RED, "")
    return p


def _room():
    p = Params()
    p.Define("lamp", _lamp(), "The lamp.")
    p.Define("size", (3, 4), "")
    p.Define("table", {"b": 2, "a": _Color.RED}, "")
    return p


def test_set_and_get_by_dotted_path():
    p = _room()
    assert p.Set(**{"lamp.watts": 40}, size=(5, 6)) is p
    assert (p.lamp.watts, p.Get("lamp.watts"), p.size) == (40, 40, (5, 6))
    p.lamp.watts = 25
    assert p.Get("lamp.watts") == 25
    assert "lamp" in p and "watts" not in p and "lamp" in dir(p)
    assert p.Describe("lamp") == "The lamp."


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lamp.wats", r"^No hyperparameter 'lamp.wats'; did you mean lamp.watts\?$"),
        ("lmp", "No hyperparameter 'lmp'; did you mean lamp"),
        ("lamp.col", "did you mean lamp.color or lamp.cls"),
        ("lmp.watts", r"No hyperparameter 'lmp'; did you mean lamp\?"),
        ("zzz", r"^No hyperparameter 'zzz'; expected one of lamp, size, table\.$"),
        ("size.x", r"'size.x': 'size' is \(3, 4\), not a group of settings"),
    ],
)
def test_an_unknown_name_names_the_nearest(path, message):
    for use in (lambda: _room().Set(**{path: 1}), lambda: _room().Get(path)):
        with pytest.raises(AttributeError, match=message):
            use()


def test_an_unknown_attribute_cannot_be_made_by_assignment():
    with pytest.raises(AttributeError, match="did you mean size"):
        _room().sise = 3
    with pytest.raises(AttributeError, match="did you mean lamp"):
        _room().Describe("lam")


@pytest.mark.parametrize("name", ["two words", "_hidden", "", "1st"])
def test_a_name_must_be_an_identifier(name):
    with pytest.raises(ValueError, match="must be an identifier, got"):
        Params().Define(name, 1, "")


def test_a_name_is_defined_once():
    with pytest.raises(ValueError, match="'size' is defined already"):
        _room().Define("size", 1, "")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_layers", "8", "num_layers: expected int, got str '8'. L."),
        ("num_layers", True, "num_layers: expected int, got bool True. L."),
        ("num_layers", 2.5, "num_layers: expected int, got float 2.5. L."),
        ("num_layers", None, "num_layers: expected int, got NoneType None. L."),
        ("rate", "0.1", "rate: expected float or None, got str '0.1'. The rate."),
        ("is_fast", 1, "is_fast: expected bool, got int 1. Fast."),
        ("color", "RED", "color: expected RED, got str 'RED'. The color."),
        ("languages", "de", "languages: expected tuple, got str 'de'. Codes."),
        ("name", b"x", "name: expected str, got bytes b'x'. A name."),
    ],
)
def test_a_value_of_another_type_than_the_declared_one_is_refused(name, value, message):
    for change in (lambda p: p.Set(**{name: value}), lambda p: setattr(p, name, value)):
        p = _Typed()
        before = p.Get(name)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            change(p)
        assert p.Get(name) == before


def test_a_value_of_another_type_is_named_with_its_whole_path():
    p = Params()
    p.Define("inner", _Typed(), "")
    with pytest.raises(ValueError, match="^inner.num_layers: expected int, got str '8'"):
        p.Set(**{"inner.num_layers": "8"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", np.int32(8)),
        ("num_layers", REQUIRED),
        ("rate", 1),
        ("rate", np.float32(0.5)),
        ("rate", None),
        ("languages", ["de"]),
        ("inner", None),  # A declared type that text cannot express is not checked.
    ],
)
def test_a_value_of_the_declared_type_is_set_as_it_is(name, value):
    assert _Typed().Set(**{name: value}).Get(name) is value


def test_frozen_all_the_way_down_and_a_copy_is_not():
    p = _room().Freeze()
    for change in (
        lambda: p.Set(size=1),
        lambda: p.Set(**{"lamp.watts": 1}),
        lambda: p.lamp.Set(watts=1),
        lambda: p.Define("more", 1, ""),
        lambda: setattr(p.lamp, "watts", 1),
    ):
        with pytest.raises(ValueError, match="frozen: Copy"):
            change()
    q = p.Copy().Set(**{"lamp.watts": 1})
    assert (q.lamp.watts, p.lamp.watts) == (1, 60)


def test_a_copy_shares_nothing():
    p = _room()
    q = p.Copy()
    q.lamp.watts, q.table["b"] = 7, 8
    assert (p.lamp.watts, p.table["b"]) == (60, 2)
    assert p != q and p == _room() and isinstance(q.lamp, InstantiableParams)


def test_text_lists_the_leaves_in_order():
    assert _room().ToText() == (
        f"lamp.cls : {__name__}._Lamp\n"
        "lamp.color : RED\n"
        "lamp.watts : 60\n"
        "size : (3, 4)\n"
        "table : {a: RED, b: 2}\n"
    )
    assert str(_room()) == _room().ToText()


def test_instantiate_passes_the_params_and_the_arguments():
    p = _lamp().Set(watts=5)
    lamp = p.Instantiate("here")
    assert lamp.params is p and lamp.args == ("here",)


def test_instantiate_names_missing_settings():
    p = _lamp().Set(watts=REQUIRED, color=REQUIRED)
    with pytest.raises(ValueError, match="_Lamp: set watts, color before Instantiate"):
        p.Instantiate()
    assert p.Copy().watts is REQUIRED and "watts : REQUIRED" in p.ToText()


@pytest.mark.parametrize("watts", [math.nan, math.inf, -math.inf])
def test_instantiate_refuses_numbers_that_are_not_finite(watts):
    with pytest.raises(ValueError, match=f"_Lamp: watts must be finite, got {watts}"):
        _lamp().Set(watts=watts).Instantiate()
    assert _lamp().Set(watts=10**400).Instantiate().params.watts == 10**400


def test_differences_of_two_texts():
    ours, theirs = _room(), _room().Set(**{"lamp.watts": 9})
    theirs.Define("more", 1, "")
    assert settings.differences(ours.ToText(), theirs.ToText()) == [
        "lamp.watts: 60, not 9",
        "more: absent, not 1",
    ]
    assert settings.differences(ours.ToText(), ours.ToText()) == []


def test_neither_params_nor_nested_maps_load_tensorflow_or_jax():
    code = (
        "import sys; import lingvo_gshard.core.hyperparams, lingvo_gshard.core.nested_map;"
        "sys.exit(bool({'tensorflow', 'jax', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_text_has_the_type_of_the_value():
    p = Params()
    p.Define("inner", Params(), "")
    p.inner.Define("count", 3, "How many.")
    p = p.Copy()
    hyperparams.apply_setting(p, "inner.count=5")
    assert p.inner.count == 5
    with pytest.raises(ValueError, match="is 5; expected int, got NoneType. How many"):
        hyperparams.apply_setting(p, "inner.count=None")


def test_values_that_the_program_sets_are_not_settings():
    p = Params()
    p.Define("folder", REQUIRED, "")
    p.Define("moe", None, "")
    for change in ("folder=x", "moe=5"):
        with pytest.raises(ValueError, match=f"--set={change}: .* cannot be set; the program"):
            hyperparams.apply_setting(p, change)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.max_steps=500", "train.max_steps", 500),
        ("a=0.5", "a", 0.5),
        ("a=None", "a", None),
        ("a=(1, 2)", "a", (1, 2)),
        ("a=dev", "a", "dev"),
        ("a=x=y", "a", "x=y"),
        ("a={'B': 'd'}", "a", {"B": "d"}),
        ("a=", "a", ""),
        ("a={[]: 1}", "a", "{[]: 1}"),
    ],
)
def test_a_setting_is_a_literal_or_a_string(override, path, value):
    assert hyperparams.parse_setting(override) == (path, value)


@pytest.mark.parametrize("override", ["train.max_steps", "=3", ""])
def test_a_setting_without_path_or_value_is_refused(override):
    with pytest.raises(ValueError, match=f"--set={override}: expected path=value, such as"):
        hyperparams.parse_setting(override)
