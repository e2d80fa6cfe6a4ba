"""Expected times as text."""

import pytest

from lingvo_gshard.planning.published import factors, factors_text
from tests.planning import published_steps
from tests.planning.published_steps import record


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """Returns a function that puts records in the place of the published ones."""

    def put(*records):
        name = "_".join(each.id for each in records)  # A file is read once.
        path = published_steps.write(tmp_path / f"{name}.json", *records)
        monkeypatch.setattr(factors, "BOUNDS", path)
        return factors.by_machine(records)

    return put


def test_the_basis_names_records_and_what_was_held_out(publish):
    slower = {"bound_secs": 4.8, "measured_secs": 6.0}
    publish(record("a", 0.5), record("b", 0.6), record("c", 0.8, **slower), record("d", 0.7))
    assert factors_text.basis("v3:8x8") == (
        "expected on v3: the bound over 0.63, as 2 published training steps of somebody/lm "
        "(4 to 6 s, 8 devices) reached 0.50 to 0.80 of it; 2 held out: -5% to +11% off"
    )
    publish(record("a", 0.5), record("b", 0.6))
    assert factors_text.basis("v3:8x8").endswith("reached 0.50 of it; 1 held out: +20% off")
    publish(record("a", 0.5))
    assert factors_text.basis("v3:8x8") == (
        "expected on v3: the bound over 0.50, as 1 published training step of somebody/lm "
        "(4 s, 8 devices) reached 0.50 of it"
    )


def test_a_machine_without_records_is_said_to_have_none(publish):
    publish(record("a", 0.5))
    assert factors_text.basis("h100:16x8") == (
        "expected on h100: unknown, for want of published steps; the bound is all"
    )


def test_seconds_have_a_band_if_several_records_are_fitted(publish):
    several = publish(record("a", 0.5), record("b", 0.6), record("c", 0.8))["v3"]
    assert factors_text.expected_secs(several, 2.0) == "3.16 s a step (2.5 to 4)"
    single = publish(record("a", 0.5))["v3"]
    assert factors_text.expected_secs(single, 2.0) == "4 s a step (no band)"


def test_the_fits_of_all_machines(publish):
    shares = {"a": 0.5, "b": 0.9, "c": 0.8, "d": 0.6, "e": 0.6, "f": 0.7, "g": 1.25}
    records = [record(name, share) for name, share in shares.items()]
    text = factors_text.fits(publish(*records, record("h", 0.4, "h100")))
    rows = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = line.strip("| ").split(" | ")
            rows[name] = cells

    # The shares a, c, e and g have the geometric mean 0.74.
    assert rows["v3"][:4] == ["4", "3", "0.740", "0.50 to 1.25"]
    assert rows["v3"][4:9] == ["26%", "+69%", "19%", "+22%", "3 of 3"]
    assert rows["h100"] == ["1", "0", "0.400", "0.40", *"----", "0 of 0", *"----"]
    *_, first, second = text.splitlines()
    assert first == "- h100: 1 of somebody/lm"
    assert second == (
        "- v3: 7 of somebody/lm; 3 of 3 held out are within 25%; faster than their bounds: g"
    )


def test_what_is_beyond_the_aim_is_named_the_worst_first(publish):
    shares = {"a": 0.5, "b": 0.7, "c": 0.5, "d": 0.35, "e": 0.5, "f": 1.0}
    records = [record(name, share) for name, share in shares.items()]
    text = factors_text.fits(publish(*records))
    assert text.endswith("0 of 3 held out are within 25%; beyond: f +100.0%, b +40.0%, d -30.0%")
