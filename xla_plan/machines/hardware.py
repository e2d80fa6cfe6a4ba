"""Published figures of TPUs and GPUs.

Each figure describes one core or GPU, which the compiler sees as a device. Link rates count one
direction.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from xla_plan.machines import published
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


def _tpu(figures: Mapping[str, Any]) -> Generation:
    """Returns the figures of a core, which has an equal share of its chip."""
    cores = figures["cores_per_chip"]
    core = dict(figures["core"])
    chip = {name: rate / cores for name, rate in figures["chip"].items()}
    return Generation(
        cores_per_chip=cores,
        peak_flops=chip.pop("peak_flops"),
        memory_bytes_per_sec=chip.pop("memory_bytes_per_sec"),
        xla_memory_bytes_per_sec=core.pop("xla_memory_gib_per_sec") * GIB,
        other_peak_flops=chip,
        **core,
    )


def _gpu(name: str, figures: Mapping[str, Any]) -> Generation:
    """Returns the figures of a GPU."""
    gpu = GPUS[name]
    return Generation(
        cores_per_chip=1,
        peak_flops=figures["peak_flops"],
        memory_bytes_per_sec=gpu.memory_bytes_per_sec,
        capacity_gib=environment.GPU_MEMORY_SHARE * gpu.memory_bytes / GIB,
        link_bytes_per_sec=figures["nvlink_bytes_per_sec"],
        network_bytes_per_sec=figures["adapter_bytes_per_sec"],
        other_peak_flops=figures["other_peak_flops"],
        counts_as=_GPU_COUNTS_AS,
    )


# The generations by the first part of a topology's name. No figures of v2 are published.
GENERATIONS = {
    **{name: _tpu(figures) for name, figures in published.TPUS.items() if "chip" in figures},
    **{name: _gpu(name, figures) for name, figures in published.GPUS.items()},
}


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
    # A GPU's name in machines.toml begins with its device_kind. Cards with other memory or links,
    # such as PCIe cards, have other names.
    for name, gpu in GPUS.items():
        if f"{gpu.name} ".startswith(f"{device_kind} "):
            return name
    for name, figures in published.TPUS.items():
        if device_kind in figures.get("device_kinds", ()):
            return name
    return None
