"""A fixture for the tests of lowering and of programs."""

import jax
import pytest


@pytest.fixture
def shardy_off():
    """Switches JAX to XLA's older propagator, GSPMD; its default is Shardy."""
    assert jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)
