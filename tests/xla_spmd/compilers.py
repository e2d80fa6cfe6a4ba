"""XLA's compilers for other machines; some environments lack them."""

import pytest

from xla_plan.machines import topology


def need(name: str) -> None:
    """Skips the test if the compiler for a topology, such as v3:2x2 or h100, is not installed."""
    if not topology.is_installed(name.partition(":")[0]):
        pytest.skip(f"no compiler for {name}; `make setup-tpu setup-plan-gpu` installs them")
