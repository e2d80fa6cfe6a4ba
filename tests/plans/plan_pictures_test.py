"""Figures 7 and 8: the bars of plans made by hand."""

import pytest
from matplotlib.figure import Figure

from lingvo_gshard.plans import plan_pictures
from tests.xla_plan import samples


@pytest.fixture
def drawn(monkeypatch):
    """Keeps the drawings instead of writing them; returns them by the names of their files."""
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
    plan_pictures.draw_step(samples.plan(samples.cost()), tmp_path)
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


def test_a_bar_of_time_has_every_category_and_the_network(drawn, tmp_path):
    plan_pictures.draw_step(samples.plan(samples.cost(step_secs=0.5, network_secs=0.1)), tmp_path)
    bars = _bars(drawn["time.png"])
    first, *_, last = bars
    assert (first, last) == ("experts", "collectives")
    assert len(bars) == 12 and bars["dispatch, combine"] == [0.0]

    # A core's own work, without the network.
    assert bars["experts"] == [pytest.approx(240.0)]
    assert bars["optimizer"] == [pytest.approx(160.0)]
    assert bars["collectives"] == [pytest.approx(100.0)]


def test_plans_that_do_not_fit_have_no_bar_of_time(drawn, tmp_path):
    made = {
        "a": samples.plan(samples.cost()),
        "b": samples.plan(None),
        "c": samples.plan(samples.cost(0.25)),
    }
    plan_pictures.draw(made, tmp_path / "figure_7.png", tmp_path / "figure_8.png")
    assert len(_bars(drawn["figure_7.png"])["expert weights"]) == 3
    assert len(_bars(drawn["figure_8.png"])["experts"]) == 2

    drawn.clear()
    plan_pictures.draw_step(made["b"], tmp_path)
    assert list(drawn) == ["memory.png"]


def test_the_pictures_are_written(tmp_path):
    plan_pictures.draw_step(samples.plan(samples.cost()), tmp_path)
    for name in ("memory.png", "time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
