"""The drawing of the rooms matches the imports."""

from tests.docs.scripts import ROOT
from tools import draw_rooms


def test_the_drawing_is_up_to_date():
    document = (ROOT / "docs/architecture.md").read_text()
    assert draw_rooms.drawn(document) == document, "run `python -m tools.draw_rooms`"


def test_a_longer_way_makes_an_arrow_unnecessary():
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert draw_rooms.reduced(graph) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}


def test_every_room_has_an_arrow():
    arrows = draw_rooms.arrows()
    assert {"layers", "model", "spmd", "programs"} <= arrows.keys()
    assert "core" in arrows["layers"] and arrows["core"] == {"xla_spmd"}
