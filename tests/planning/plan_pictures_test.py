"""Figures 7 and 8: the bars of plans made by hand."""

import dataclasses

import pytest
from matplotlib.figure import Figure

from lingvo_gshard.planning import plan_pictures
from lingvo_gshard.planning.plan import Memory
from tests.planning import plans


@pytest.fixture
def drawn(monkeypatch):
    """Keeps the drawings in place of writing them; returns them by the names of their files."""
    figures = {}

    def keep(figure, path, dpi):
        figures[path.name] = figure

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def _bars(figure):
    """Returns the heights of each part, one for each plan, from the bottom to the top."""
    (axes,) = figure.axes
    return {part.get_label(): [bar.get_height() for bar in part] for part in axes.containers}


def test_a_bar_of_memory_ends_at_the_peak(drawn, tmp_path):
    plan_pictures.draw_step(plans.plan(plans.cost()), tmp_path)
    figure = drawn["memory.png"]
    assert _bars(figure) == {
        "replicated weights": [1.0],
        "expert weights": [2.0],
        "optimizer slots": [0.25],
        "temporaries": [5.75],
    }

    (axes,) = figure.axes
    (capacity,) = axes.lines
    assert list(capacity.get_ydata()) == [15.48, 15.48]
    assert axes.get_ylabel() == "GiB a core"


def test_temporaries_in_the_place_of_donated_state_have_no_bar(drawn, tmp_path):
    reused = plans.plan(plans.cost(), memory_gib=Memory(15.48, 1.0, 2.0, 0.25, 3.0, peak=3.0))
    plan_pictures.draw_step(reused, tmp_path)
    assert _bars(drawn["memory.png"])["temporaries"] == [0.0]


def test_a_bar_of_time_has_every_category_and_the_network(drawn, tmp_path):
    plan_pictures.draw_step(plans.plan(plans.cost(step_secs=0.5, network_secs=0.1)), tmp_path)
    bars = _bars(drawn["time.png"])
    first, *_, last = bars
    assert (first, last) == ("experts", "collectives")
    assert len(bars) == 12 and bars["dispatch, combine"] == [0.0]

    # What a core does by itself, without the network.
    assert bars["experts"] == [pytest.approx(240.0)]
    assert bars["optimizer"] == [pytest.approx(160.0)]
    assert bars["collectives"] == [pytest.approx(100.0)]


def test_plans_that_do_not_fit_have_no_bar_of_time(drawn, tmp_path):
    made = {"a": plans.plan(plans.cost()), "b": plans.plan(None), "c": plans.plan(plans.cost(0.25))}
    plan_pictures.draw(made, tmp_path / "figure_7.png", tmp_path / "figure_8.png")
    assert len(_bars(drawn["figure_7.png"])["expert weights"]) == 3
    assert len(_bars(drawn["figure_8.png"])["experts"]) == 2

    drawn.clear()
    plan_pictures.draw_step(made["b"], tmp_path)
    assert list(drawn) == ["memory.png"]


def test_machines_with_other_memory_have_lines_of_their_own(drawn, tmp_path):
    gpu = plans.plan(plans.cost(), topology="h100:16x8")
    larger = dataclasses.replace(gpu.step.memory_gib, capacity=60.0)
    made = {"a": gpu, "b": plans.plan(plans.cost(), topology="h200:16x8", memory_gib=larger)}
    plan_pictures.draw(made, tmp_path / "figure_7.png", tmp_path / "figure_8.png")
    (axes,) = drawn["figure_7.png"].axes
    assert {line.get_ydata()[0] for line in axes.lines} == {15.48, 60.0}
    assert axes.get_ylabel() == "GiB a GPU"


def test_the_pictures_are_written(tmp_path):
    plan_pictures.draw_step(plans.plan(plans.cost()), tmp_path)
    for name in ("memory.png", "time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
