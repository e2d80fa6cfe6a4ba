"""The dtype in which this machine multiplies faster."""

import jax
import numpy as np
import pytest

from lingvo_gshard.spmd import product_speed


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Returns the folder that keeps results between starts."""
    monkeypatch.setattr(
        product_speed.environment, "machine_cache_folder", lambda: tmp_path / "machine"
    )
    return tmp_path / "machine"


@pytest.fixture
def measured(monkeypatch):
    """Sets the seconds of a step by dtype; returns the dtypes of the steps that ran."""

    def set_secs(**secs):
        ran = []

        def secs_of(step, *args):
            # The compiled gradients of a rounded layer take bfloat16 factors.
            dtype = "bfloat16" if "bf16" in step.as_text() else "float32"
            ran.append(dtype)
            return secs[dtype]

        monkeypatch.setattr(product_speed, "_secs", secs_of)
        return ran

    return set_secs


@pytest.mark.parametrize(
    ("bfloat16_secs", "fastest"),
    [(0.5, "bfloat16"), (0.94, "bfloat16"), (0.96, "float32"), (1.2, "float32")],
)
def test_rounding_must_save_a_twentieth_of_the_time(cache, measured, bfloat16_secs, fastest):
    measured(float32=1.0, bfloat16=bfloat16_secs)
    assert product_speed.fastest_dtype(8) == fastest


def test_a_machine_is_measured_once_for_each_size(cache, measured):
    ran = measured(float32=1.0, bfloat16=0.5)
    first = product_speed.fastest_dtype(8)
    assert sorted(set(ran)) == ["bfloat16", "float32"]

    ran.clear()
    assert product_speed.fastest_dtype(8) == first
    assert not ran
    product_speed.fastest_dtype(16)
    assert ran


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"M=8": "float8"}', b"\xff"])
def test_a_damaged_file_is_measured_again(cache, measured, content):
    measured(float32=1.0, bfloat16=0.5)
    product_speed.fastest_dtype(8)
    (file,) = cache.iterdir()
    file.write_bytes(content)
    ran = measured(float32=1.0, bfloat16=2.0)
    assert product_speed.fastest_dtype(8) == "float32"
    assert ran


def test_without_a_cache_it_is_measured_each_time(monkeypatch, measured):
    monkeypatch.setattr(product_speed.environment, "machine_cache_folder", lambda: None)
    ran = measured(float32=1.0, bfloat16=0.5)
    product_speed.fastest_dtype(8)
    ran.clear()
    product_speed.fastest_dtype(8)
    assert ran


def test_a_cache_that_cannot_be_written_costs_only_a_warning(cache, measured, caplog):
    measured(float32=1.0, bfloat16=0.5)
    cache.write_text("a file where a folder is expected")
    assert product_speed.fastest_dtype(8) == "bfloat16"
    assert "faster dtype of products is not kept" in caplog.text


@pytest.mark.slow
def test_the_steps_that_are_timed_compute_the_same_gradients():
    keys = jax.random.split(jax.random.key(0), 3)
    x_BM = jax.random.normal(keys[0], (32, 8))
    weights = (jax.random.normal(keys[1], (8, 32)), jax.random.normal(keys[2], (32, 8)))
    exact, rounded = (
        jax.grad(product_speed._loss)(weights, x_BM, dtype) for dtype in ("float32", "bfloat16")
    )
    for a, b in zip(exact, rounded, strict=True):
        assert np.abs(np.asarray(a - b)).max() < 0.02 * np.abs(np.asarray(a)).max()
        assert (np.asarray(a) != np.asarray(b)).any()
