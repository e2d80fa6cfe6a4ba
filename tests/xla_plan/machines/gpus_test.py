"""XLA's figures of each GPU; tests/plans/gpus_test.py compiles for them."""

import re

import pytest

from xla_plan.machines.gpus import GPUS


def _number(text: str, field: str) -> int:
    (value,) = re.findall(rf"\b{field}: (\d+)\b", text)
    return int(value)


@pytest.mark.parametrize("name", GPUS)
def test_the_config_has_a_gpus_own_figures(name):
    gpu = GPUS[name]
    text = gpu.target_config()
    assert text.count("{") == text.count("}")
    assert f'device_description_str: "{gpu.name}"' in text
    capability = f"major: {gpu.capability} minor: {gpu.minor}"
    assert f"cuda_compute_capability {{ {capability} }}" in text
    assert _number(text, "core_count") == gpu.cores
    assert _number(text, "device_memory_size") == gpu.memory_bytes
    assert _number(text, "memory_bandwidth") == gpu.memory_bytes_per_sec
    # The driver keeps 1 KiB of each block's shared memory.
    kept_bytes = _number(text, "shared_memory_per_core") - _number(
        text, "shared_memory_per_block_optin"
    )
    assert kept_bytes == 1024


def test_newer_gpus_have_at_least_as_much_memory_and_bandwidth():
    gpus = list(GPUS.values())
    assert [gpu.capability for gpu in gpus] == sorted(gpu.capability for gpu in gpus)
    assert [gpu.memory_bytes_per_sec for gpu in gpus] == sorted(
        gpu.memory_bytes_per_sec for gpu in gpus
    )
