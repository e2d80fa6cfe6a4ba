"""Expected times as text."""

import pytest

from tests.repro.published import published_steps
from tests.repro.published.published_steps import record
from xla_plan.expected import factors, factors_text


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """Returns a function that replaces the published records."""

    def put(*records):
        name = "_".join(each.id for each in records)  # A file is read once.
        path = published_steps.write(tmp_path / f"{name}.json", *records)
        monkeypatch.setattr(factors, "BOUNDS", path)
        return factors.by_machine(records)

    return put


def test_the_basis_names_fitted_and_held_out_records(publish):
    slower = {"bound_secs": 4.8, "products_secs": 2.4, "measured_secs": 6.0}
    publish(record("a", 0.5), record("b", 0.6), record("c", 0.8, **slower), record("d", 0.7))
    assert factors_text.basis("v3:8x8") == (
        "expected on v3: the bound over 0.63, as 2 published training steps of somebody/lm "
        "(4 to 6 s, 8 devices, rows of 1024 tokens) reached 0.50 to 0.80 of it; 2 held out: "
        "-5% to +11% off"
    )
    publish(record("a", 0.5), record("b", 0.6))
    assert factors_text.basis("v3:8x8").endswith("reached 0.50 of it; 1 held out: +20% off")
    publish(record("a", 0.5))
    assert factors_text.basis("v3:8x8") == (
        "expected on v3: the bound over 0.50, as 1 published training step of somebody/lm "
        "(4 s, 8 devices, rows of 1024 tokens) reached 0.50 of it"
    )


def test_records_that_were_faster_than_their_bounds_are_named(publish):
    publish(record("a", 0.5), record("b", 1.05))
    assert factors_text.basis("v3:8x8").endswith(
        "; 1 held out: +110% off; the bound is not a least time: faster was b"
    )


def test_a_machine_without_records_is_reported(publish):
    publish(record("a", 0.5))
    assert factors_text.basis("h100:16x8") == (
        "expected on h100: unknown, as no steps on it are published"
    )


def test_a_step_unlike_all_fitted_ones_is_marked_as_extrapolated(publish):
    publish(
        record("a", 0.5, measured_secs=2.0),
        record("b", 0.5),
        record("c", 0.5, measured_secs=8.0, devices=64, row_tokens=4096),
    )

    def lines(*step):
        return list(factors_text.extrapolation("v3:8x8", *step))

    # The records a and c are fitted: the expected time of a bound of 2 s is 4 s at most.
    assert lines(2.0, 16, 2048) == [] and lines(2.0, 64) == []
    assert lines(100.0, 8, 2048)[0].startswith("the expected time extrapolates: nothing like a ste")
    assert lines(2.0, 1, 8192) == [
        "the expected time extrapolates: nothing like 1 device, rows of 8192 tokens was fitted"
    ]
    assert list(factors_text.extrapolation("h100:1x8", 2.0, 1)) == []


def test_seconds_have_a_band_if_several_records_are_fitted(publish):
    several = publish(record("a", 0.5), record("b", 0.6), record("c", 0.8))["v3"]
    assert factors_text.expected_secs(several, 2.0) == "3.16 s a step (2.5 to 4)"
    single = publish(record("a", 0.5))["v3"]
    assert factors_text.expected_secs(single, 2.0) == "4 s a step (no band)"
