"""The model of Figure 9."""

import pytest

from repro.tables import figure9


def test_figure_9_has_a_point_for_each_collective_and_number_of_cores():
    points = list(figure9.points())
    assert {point.cores for point in points} == {16, 32, 64, 128, 256, 512, 1024, 2048}
    assert len(points) == 8 * 2 * 2
    least, most = (point.secs for point in points[:2])  # They are for 8 and 32 MiB.
    assert most == pytest.approx(4 * least)


@pytest.mark.parametrize("mib", [8, 32])
def test_the_model_of_figure_9_grows_as_the_paper_measured(mib):
    secs = {}
    for point in figure9.points():
        if point.mib == mib:
            secs[point.kind, point.cores] = point.secs
    growth = {kind: secs[kind, 2048] / secs[kind, 16] for kind in ("all-to-all", "all-reduce")}
    assert growth["all-to-all"] == pytest.approx(9.0, rel=0.3)  # The paper's number.
    assert growth["all-reduce"] == pytest.approx(1.0, abs=0.25)
