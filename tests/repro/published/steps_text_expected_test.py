"""Published steps beside their plans: expected times, and the half that each step is in."""

from repro.published import steps_text
from repro.published.steps import Step
from tests.xla_plan import samples


def _step(name, bound_secs, **changes):
    """Returns a step that took a second. Without a bound, its plan does not fit."""
    fields = dict(
        id=name,
        topology="v3:2x2",
        model="1 B weights",
        devices=8,
        row_tokens=1024,
        measured_secs=1.0,
        source="somebody/lm table.md@1234",
        cost=None if bound_secs is None else samples.cost(bound_secs, 0.2 * bound_secs),
        gib=9.0,
        capacity_gib=15.48,
        compile_secs=20.0,
    )
    return Step(**(fields | changes))


def _rows(text):
    """Returns the cells of the first tables' rows by the steps' names."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = line.strip("| ").split(" | ")
            rows.setdefault(name, cells)
    return rows


def test_each_step_has_an_expected_time_and_a_half():
    loops = {"no_bound": "products are loops"}
    steps = [
        _step("a", 0.5),
        _step("b", 0.6),
        _step("c", 0.8),
        _step("d", None),
        _step("e", 0.9, **loops),
        _step("f", 0.9, topology="v4:2x2x1", **loops),
    ]
    text = steps_text.tables(steps)
    rows = _rows(text)

    # The geometric mean of 0.5 and 0.8 is 0.632. Alike parts of the bounds have equal rates.
    assert rows["step"][-3:] == ["expected ms", "off", "half"]
    assert rows["a"][-3:] == ["790.57", "-21%", "fitted"]
    assert rows["b"][-3:] == ["948.68", "-5%", "held out"]
    assert rows["c"][-3:] == ["1264.9", "+26%", "fitted"]
    assert rows["d"][-3:] == ["-", "-", "-"]

    # A plan that is not a bound has an expected time if its machine has other bounds.
    assert rows["e *"][-3:] == ["1423", "+42%", "-"]
    assert rows["f *"][-3:] == ["-", "-", "-"]
    assert rows["v3"] == ["-", *["0.63 (0.50 to 0.80)"] * 2] and "v4" not in rows
    assert "- v3: 3 of somebody/lm; 1 of 1 held out are within 25%" in text.splitlines()
