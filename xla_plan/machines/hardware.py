"""Published figures of TPUs and GPUs.

Each figure describes one core or GPU, which the compiler sees as a device. Link rates count one
direction.
"""

import dataclasses
import types
from collections.abc import Mapping

from xla_plan.machines.gpus import GPUS
from xla_spmd.runtime import environment

GIB = 2.0**30

# The arithmetic of a float32 product, by the program's requested precision. A TPU multiplies
# bfloat16: once by default, or in 3 or 6 products of parts. On a GPU, XLA uses TF32 unless the
# program requests the highest precision. A GPU multiplies int32 no faster than float32.
_TPU_COUNTS_AS = types.MappingProxyType(
    {"f32": "bf16", "f32 high": "bf16 x3", "f32 highest": "bf16 x6"}
)
_GPU_COUNTS_AS = types.MappingProxyType(
    {"f32": "tf32", "f32 high": "tf32", "f32 highest": "f32", "int32": "f32"}
)


@dataclasses.dataclass(frozen=True)
class Rate:
    """A peak rate of products and its arithmetic, such as `tf32` or `bf16 x3`."""

    name: str
    flops_per_sec: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The figures of one core or GPU."""

    cores_per_chip: int
    peak_flops: float  # The rate of products of bfloat16 or float16.
    memory_bytes_per_sec: float
    # The memory that a program may use, by the TPU compiler or environment.GPU_MEMORY_SHARE.
    capacity_gib: float
    link_bytes_per_sec: float  # One link of a TPU, or a GPU's whole NVLink.
    # The rates in XLA's own cost model, measured with the optimal_seconds of programs of one
    # instruction; 0 for GPUs, for which XLA reports no optimal_seconds.
    xla_peak_flops: float = 0.0
    xla_memory_bytes_per_sec: float = 0.0
    # The rate of a GPU's network adapter, or of a TPU chip's share of its host's adapters to the
    # data center's network, which joins slices; 0 if it is not published.
    network_bytes_per_sec: float = 0.0
    # The peak rates of other products: `fp8`, `int8`, `tf32`, `f32` and `f64`. Any other arithmetic
    # counts at bfloat16's rate.
    other_peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    counts_as: Mapping[str, str] = dataclasses.field(default_factory=lambda: _TPU_COUNTS_AS)

    def rate(self, arithmetic: str) -> Rate:
        """Returns the peak rate of products in an arithmetic of xla_spmd/hlo/products.py."""
        name = self.counts_as.get(arithmetic, arithmetic)
        # `bf16 x3` is the sum of three products.
        kind, _, products = name.partition(" x")
        if kind not in self.other_peak_flops:
            kind = "bf16"
        peak_flops = self.other_peak_flops.get(kind, self.peak_flops)
        name = f"{kind} x{products}" if products else kind
        return Rate(name, peak_flops / int(products or 1))


def _gpu(
    name: str, peak_flops: float, nvlink: float, adapter: float, **other_peak_flops: float
) -> Generation:
    """Returns a GPU's figures; the size of its memory comes from xla_plan/machines/gpus.py."""
    gpu = GPUS[name]
    return Generation(
        cores_per_chip=1,
        peak_flops=peak_flops,
        memory_bytes_per_sec=gpu.memory_bytes_per_sec,
        capacity_gib=environment.GPU_MEMORY_SHARE * gpu.memory_bytes / GIB,
        link_bytes_per_sec=nvlink,
        network_bytes_per_sec=adapter,
        other_peak_flops=other_peak_flops,
        counts_as=_GPU_COUNTS_AS,
    )


# The generations by the prefix of a topology's name. A chip's rates are published at
# https://cloud.google.com/tpu/docs/GENERATION, and divided here by its cores. The link rates of v3
# and v4 are from https://doi.org/10.1145/3360307 and https://arxiv.org/abs/2304.01433. The pages of
# v5e, v5p, v6e and tpu7x give the rate of a chip's 4 or 6 links in both directions. The pages of
# v5e and v6e give the adapters of a host of 8 chips, 2 of 100 and 4 of 200 Gbit/s (and the same
# rate a chip for 256 chips: 6.4 and 25.6 Tbit/s); the page of v5p gives 50 Gbit/s a chip. The pages
# of v4 to v6e give int8's rate, and tpu7x' page fp8's.
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
        other_peak_flops={"int8": 275e12 / 2},
        memory_bytes_per_sec=1200e9 / 2,
        capacity_gib=15.25,
        link_bytes_per_sec=50e9,
        xla_peak_flops=137e12,
        xla_memory_bytes_per_sec=457.5 * GIB,
    ),
    "v5e": Generation(
        cores_per_chip=1,
        peak_flops=197e12,
        other_peak_flops={"int8": 393e12},
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
        other_peak_flops={"int8": 918e12},
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
        other_peak_flops={"int8": 1836e12},
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
        other_peak_flops={"fp8": 4614e12 / 2},
        memory_bytes_per_sec=7380e9 / 2,
        capacity_gib=94.75,
        link_bytes_per_sec=1200e9 / 6 / 2,
        xla_peak_flops=996e12,
        xla_memory_bytes_per_sec=3432.9 * GIB,
    ),
}

# Flops without sparsity, NVLink and network adapter, as NVIDIA publishes them: the data sheets of
# A100, H100, H200, of HGX B200 and B300, and of GB200 and GB300 NVL72. The float64 rate is the
# tensor cores'. The adapters are the DGX systems': 200 Gbit/s for each A100, 800 for each B300 and
# GB300, 400 for each of the others.
_GPU_GENERATIONS = {
    "a100": _gpu(
        "a100",
        peak_flops=312e12,
        nvlink=300e9,
        adapter=25e9,
        int8=624e12,
        tf32=156e12,
        f32=19.5e12,
        f64=19.5e12,
    ),
    **{
        name: _gpu(
            name,
            peak_flops=989e12,
            nvlink=450e9,
            adapter=50e9,
            fp8=1979e12,
            int8=1979e12,
            tf32=494.5e12,
            f32=67e12,
            f64=67e12,
        )
        for name in ("h100", "h200")
    },
    "b200": _gpu(
        "b200",
        peak_flops=2250e12,
        nvlink=900e9,
        adapter=50e9,
        fp8=4500e12,
        int8=4500e12,
        tf32=1125e12,
        f32=75e12,
        f64=37e12,
    ),
    "gb200": _gpu(
        "gb200",
        peak_flops=2500e12,
        nvlink=900e9,
        adapter=50e9,
        fp8=5000e12,
        int8=5000e12,
        tf32=1250e12,
        f32=80e12,
        f64=40e12,
    ),
    "gb300": _gpu(
        "gb300",
        peak_flops=2500e12,
        nvlink=900e9,
        adapter=100e9,
        fp8=5000e12,
        int8=165e12,
        tf32=1250e12,
        f32=80e12,
        f64=1.39e12,
    ),
    "b300": _gpu(
        "b300",
        peak_flops=2250e12,
        nvlink=900e9,
        adapter=100e9,
        fp8=4500e12,
        int8=150e12,
        tf32=1125e12,
        f32=75e12,
        f64=1.25e12,
    ),
}

# TPUs by JAX's device_kind. A GPU's device_kind begins with its name in gpus.py; cards with other
# memory or links, such as PCIe cards, have other names.
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
    """Returns the generation of a topology such as `v3:8x8`. Raises ValueError if it is unknown."""
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
