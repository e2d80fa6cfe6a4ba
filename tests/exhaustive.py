"""Marks values of a parameter that `make test-slow` leaves to `make test-exhaustive`."""

import pytest

# The marks of a case that neither the quick nor the slow tests run.
RARE = [pytest.mark.slow, pytest.mark.exhaustive]


def only(*values):
    """The values, for a list beside the values that are always tried."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
