"""Published figures of TPUs and GPUs.

Figures are those of one core or GPU, which is what the compiler sees as a device. Rates of links
are those of one direction.
"""

import dataclasses

from lingvo_gshard.planning.plan import GIB
from lingvo_gshard.spmd import environment
from lingvo_gshard.spmd.gpus import GPUS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The figures of one core or GPU."""

    cores_per_chip: int
    peak_flops: float  # bfloat16 operations; a GPU's float32 products reach half of it.
    memory_bytes_per_sec: float
    # What a program may use, by the TPU compiler or environment.GPU_MEMORY_SHARE.
    capacity_gib: float
    link_bytes_per_sec: float  # Of a TPU's link, or of a GPU's whole NVLink.
    # The rates in XLA's own cost model, measured with the optimal_seconds of programs of one
    # instruction; 0 for GPUs, which have none.
    xla_peak_flops: float = 0.0
    xla_memory_bytes_per_sec: float = 0.0
    # Of a GPU's network adapter, or a TPU chip's share of its host's adapters to the data center's
    # network, which joins slices; 0 where it is not published.
    network_bytes_per_sec: float = 0.0


def _gpu(name: str, peak_flops: float, nvlink: float, adapter: float) -> Generation:
    """Returns a GPU's figures; its memory's are those of spmd/gpus.py."""
    gpu = GPUS[name]
    return Generation(
        cores_per_chip=1,
        peak_flops=peak_flops,
        memory_bytes_per_sec=gpu.memory_bytes_per_sec,
        capacity_gib=environment.GPU_MEMORY_SHARE * gpu.memory_bytes / GIB,
        link_bytes_per_sec=nvlink,
        network_bytes_per_sec=adapter,
    )


# By the prefix of a topology's name. A chip's rates are published at
# https://cloud.google.com/tpu/docs/GENERATION, and divided here by its cores; those of v3's and
# v4's links are from https://doi.org/10.1145/3360307 and https://arxiv.org/abs/2304.01433. The
# pages of v5e, v5p, v6e and tpu7x give the rate of a chip's 4 or 6 links in both directions. Those
# of v5e and v6e give the adapters of a host of 8 chips, 2 of 100 and 4 of 200 Gbit/s (and for 256
# chips as much: 6.4 and 25.6 Tbit/s); that of v5p gives 50 Gbit/s a chip.
_TPU_GENERATIONS = {
    "v3": Generation(
        cores_per_chip=2,
        peak_flops=123e12 / 2,
        memory_bytes_per_sec=900e9 / 2,
        capacity_gib=15.48,
        link_bytes_per_sec=656e9 / 8,  # Its page has 340 TB/s for all-reduces of 1024 chips.
        xla_peak_flops=61.4e12,
        xla_memory_bytes_per_sec=400 * GIB,
    ),
    "v4": Generation(
        cores_per_chip=2,
        peak_flops=275e12 / 2,
        memory_bytes_per_sec=1200e9 / 2,
        capacity_gib=15.25,
        link_bytes_per_sec=50e9,
        xla_peak_flops=137e12,
        xla_memory_bytes_per_sec=457.5 * GIB,
    ),
    "v5e": Generation(
        cores_per_chip=1,
        peak_flops=197e12,
        memory_bytes_per_sec=819e9,
        capacity_gib=15.75,
        link_bytes_per_sec=400e9 / 4 / 2,
        network_bytes_per_sec=2 * 100e9 / 8 / 8,
        xla_peak_flops=197e12,
        xla_memory_bytes_per_sec=687 * GIB,
    ),
    "v5p": Generation(
        cores_per_chip=1,
        peak_flops=459e12,
        memory_bytes_per_sec=2765e9,
        capacity_gib=95.74,
        link_bytes_per_sec=1200e9 / 6 / 2,
        network_bytes_per_sec=50e9 / 8,
        xla_peak_flops=394e12,
        xla_memory_bytes_per_sec=2189 * GIB,
    ),
    "v6e": Generation(
        cores_per_chip=1,
        peak_flops=918e12,
        memory_bytes_per_sec=1638e9,
        capacity_gib=31.25,
        link_bytes_per_sec=800e9 / 4 / 2,
        network_bytes_per_sec=4 * 200e9 / 8 / 8,
        xla_peak_flops=918e12,
        xla_memory_bytes_per_sec=1525.5 * GIB,
    ),
    "tpu7x": Generation(
        cores_per_chip=2,
        peak_flops=2307e12 / 2,
        memory_bytes_per_sec=7380e9 / 2,
        capacity_gib=94.75,
        link_bytes_per_sec=1200e9 / 6 / 2,
        xla_peak_flops=996e12,
        xla_memory_bytes_per_sec=3432.9 * GIB,
    ),
}

# bfloat16 flops without sparsity, NVLink and network adapter, as NVIDIA publishes them: the data
# sheets of A100, H100, H200 and of DGX B200 and GB200 NVL72. Adapters are those of the DGX systems:
# 200 Gbit/s for each A100, 400 Gbit/s for each of the others.
_GPU_GENERATIONS = {
    "a100": _gpu("a100", peak_flops=312e12, nvlink=300e9, adapter=25e9),
    "h100": _gpu("h100", peak_flops=989e12, nvlink=450e9, adapter=50e9),
    "h200": _gpu("h200", peak_flops=989e12, nvlink=450e9, adapter=50e9),
    "b200": _gpu("b200", peak_flops=2250e12, nvlink=900e9, adapter=50e9),
    "gb200": _gpu("gb200", peak_flops=2500e12, nvlink=900e9, adapter=50e9),
}

# TPUs by JAX's device_kind. A GPU's is the beginning of its name in spmd/gpus.py, which those with
# other memory or links, such as PCIe cards, do not have.
_TPU_KINDS = {
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}

GENERATIONS = _TPU_GENERATIONS | _GPU_GENERATIONS


def generation(topology: str) -> Generation:
    """Returns the generation of a topology such as `v3:8x8`. Raises ValueError if unknown."""
    name = topology.partition(":")[0]
    if name not in GENERATIONS:
        raise ValueError(
            f"topology {topology}: no published figures are known for {name!r}, only for "
            f"{', '.join(GENERATIONS)}."
        )
    return GENERATIONS[name]


def generation_of_kind(device_kind: str) -> str | None:
    """Returns the name in GENERATIONS of a jax.Device's device_kind; None if it is unknown."""
    for name, gpu in GPUS.items():
        if f"{gpu.name} ".startswith(f"{device_kind} "):
            return name
    return _TPU_KINDS.get(device_kind)
