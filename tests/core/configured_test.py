"""Settings that a class declares, and settings in Lingvo's form: values, errors, copies."""

from __future__ import annotations

import copy
import enum
import pickle

import pytest

from lingvo_gshard.core import hyperparams, settings
from lingvo_gshard.core.configured import Configured
from lingvo_gshard.core.hyperparams import REQUIRED, BaseParams, setting


class _Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Lamp(Configured):
    class Params(Configured.Params):
        watts: int = setting(REQUIRED, "Power.")
        color: _Color = setting(_Color.RED, "Its color.")
        shade: _Color | None = setting(None, "Its shade's color.")
        timeout: float | None = setting(None, "In seconds.")
        rooms: tuple[str, ...] | None = setting(None, "Where it stands.")

        def doubled(self) -> int:
            return 2 * self.watts

    p: Params

    def __init__(self, params: Params) -> None:
        self.p = params


class Room(Configured):
    class Params(Configured.Params):
        lamp: Lamp.Params = setting(Lamp.Params().Set(watts=60), "The lamp.")
        sizes: list[int] = setting([3, 4], "In metres.")

    p: Params


class Dim(Lamp):
    """Has other defaults."""

    class Params(Lamp.Params):
        watts = 5
        timeout = 0.5

    p: Params


class Plain(Dim):
    """Has the settings of Dim."""


class Borrowed(Configured):
    Params = Lamp.Params


class Lingvo(Lamp):
    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("height", 3, "In metres.")
        return p


class LingvoAgain(Lingvo):
    @classmethod
    def Params(cls):
        p = super().Params().Set(watts=1)
        p.Define("weight", 2.0, "")
        return p


class LingvoPlain(LingvoAgain):
    pass


def test_declared_settings_are_values_with_descriptions():
    p = Lamp.Params()
    assert (p.watts, p.color, p.timeout) == (REQUIRED, _Color.RED, None)
    assert p.Describe("watts") == "Power." and "watts" in p and "watts" in dir(p)
    assert p.Set(watts=4).doubled() == 8
    assert p.Instantiate().p is p
    with pytest.raises(AttributeError, match="No hyperparameter 'wats'; did you mean watts"):
        p.wats = 3
    with pytest.raises(ValueError, match="Lamp: set watts before Instantiate"):
        Lamp.Params().Instantiate()


def test_instances_share_nothing():
    one = Room.Params()
    one.lamp.watts = 7
    one.sizes.append(5)
    assert (Room.Params().lamp.watts, Room.Params().sizes) == (60, [3, 4])
    assert Room.Params().Freeze().Copy().Set(**{"lamp.watts": 8}).lamp.watts == 8


@pytest.mark.parametrize("cls", [Lamp, Dim, Plain, Borrowed, Lingvo, LingvoAgain, LingvoPlain])
def test_params_name_the_class_that_they_configure(cls):
    p = cls.Params()
    assert p.cls is cls
    assert f"cls : {cls.__module__}.{cls.__qualname__}\n" in p.DefaultsText()
    assert isinstance(p, Lamp.Params)
    assert Lamp.Params().cls is Lamp


def test_a_subclass_changes_defaults():
    for p in (Dim.Params(), Plain.Params()):
        assert (p.watts, p.timeout, p.color) == (5, 0.5, _Color.RED)
        assert p.Describe("watts") == "Power." and "watts : 5\n" in p.DefaultsText()
        assert isinstance(p.Instantiate(), Dim)
    assert Lamp.Params().watts is REQUIRED


def test_lingvos_form_adds_settings_to_declared_ones():
    p = LingvoPlain.Params()
    assert (p.watts, p.height, p.weight) == (1, 3, 2.0)
    assert "height" not in Lamp.Params()
    hyperparams.apply_setting(p, "height=4")
    assert p.height == 4
    with pytest.raises(ValueError, match="height is 4; expected int, got float"):
        hyperparams.apply_setting(p, "height=4.5")
    with pytest.raises(ValueError, match="'watts' is defined already"):
        p.Define("watts", 1, "")


@pytest.mark.parametrize("cls", [Room, Dim, Plain, LingvoPlain])
def test_params_cross_processes(cls):
    p = cls.Params()
    for made in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p), p.Copy()):
        assert made == p and type(made) is type(p) and made.DefaultsText() == p.DefaultsText()
        assert list(made.Settings()) == list(p.Settings())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("watts=40", 40),
        ("watts=1e3", 1000),
        ("color=BLUE", _Color.BLUE),
        ("shade=BLUE", _Color.BLUE),
        ("shade=None", None),
        ("timeout=2", 2.0),
        ("timeout=None", None),
        ("rooms=['hall']", ("hall",)),
    ],
)
def test_text_has_the_declared_type(text, value):
    p = Lamp.Params().Set(watts=1)
    hyperparams.apply_setting(p, text)
    assert repr(p.Get(text.partition("=")[0])) == repr(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("watts=None", "watts is 1; expected int, got NoneType. Power"),
        ("timeout=True", "timeout is None; expected float or None, got bool. In seconds"),
        ("color=None", "color is one of RED, BLUE"),
        ("shade=GREEN", "shade is one of RED, BLUE"),
        ("rooms=3", "rooms is None; expected tuple or None, got int"),
    ],
)
def test_text_of_another_type_is_refused(text, message):
    with pytest.raises(ValueError, match=f"--set={text.partition('=')[0]}.*{message}"):
        hyperparams.apply_setting(Lamp.Params().Set(watts=1), text)


def test_a_required_setting_is_left_to_the_program():
    with pytest.raises(ValueError, match="watts cannot be set; the program fills it in"):
        hyperparams.apply_setting(Lamp.Params(), "watts=3")


def test_the_listing_has_the_declared_types():
    kinds = {s.path: s.kind for s in settings.matching(Room.Params(), None)}
    assert kinds == {
        "lamp.watts": "int",
        "lamp.color": "RED|BLUE",
        "lamp.shade": "RED|BLUE or None",
        "lamp.timeout": "float or None",
        "lamp.rooms": "tuple or None",
        "sizes": "list",
    }


def test_new_defaults_are_listed_as_such():
    p = Lamp.Params().SetDefaults(watts=9)
    assert p.watts == 9 and "watts : 9\n" in p.DefaultsText()
    assert "watts" not in Lamp.Params().DefaultsText()
    with pytest.raises(AttributeError, match="did you mean watts"):
        p.SetDefaults(wats=1)


def test_a_misspelled_default_names_the_nearest():
    with pytest.raises(ValueError, match=r"_\.wats = 3: no inherited .* did you mean watts\?"):

        class _(Lamp.Params):
            wats = 3


def test_a_setting_is_declared_once():
    with pytest.raises(ValueError, match=r"Params\.watts is declared already; NAME = VALUE"):

        class Params(Lamp.Params):
            watts: int = setting(3, "Again.")


def test_a_setting_needs_a_type_a_default_and_a_description():
    with pytest.raises(ValueError, match=r"_\.watts: expected a type, NAME: TYPE = setting"):

        class _(BaseParams):
            watts = setting(3, "Power.")

    with pytest.raises(ValueError, match=r"Params\.watts: expected a default and a description"):

        class Params(BaseParams):
            watts: int
