"""A fixture of the tests of lowering and of programs."""

import jax
import pytest


@pytest.fixture
def shardy_off():
    """XLA's older propagation, which JAX still has; Shardy is its default."""
    assert jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)
