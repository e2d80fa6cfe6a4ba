"""What XLA's compiler must know of a GPU to compile for it with none at hand.

The figures are those of XLA's own descriptions of these GPUs (its GpuTargetConfigProto files).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as XLA's compiler sees it.

    Attributes:
      name: NVIDIA's name, as a driver gives it.
      capability: the major number of its CUDA compute capability.
      cores: streaming multiprocessors.
      fpus: float32 units of each.
      shared_bytes: shared memory of each; a block may ask for 1 KiB less.
      memory_bytes, memory_bytes_per_sec: of its high-bandwidth memory.
      l2_bytes: its level 2 cache.
      clock_ghz: its highest clock rate.
    """

    name: str
    capability: int
    cores: int
    fpus: int
    shared_bytes: int
    memory_bytes: int
    memory_bytes_per_sec: int
    l2_bytes: int
    clock_ghz: float

    def target_config(self) -> str:
        """The GpuTargetConfigProto as text."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_bytes}
              shared_memory_per_block_optin: {self.shared_bytes - 1024}
              core_count: {self.cores} fpus_per_core: {self.fpus}
              memory_bandwidth: {self.memory_bytes_per_sec} l2_cache_size: {self.l2_bytes}
              device_memory_size: {self.memory_bytes} clock_rate_ghz: {self.clock_ghz}
              cuda_compute_capability {{ major: {self.capability} }}
            }}
            platform_name: "CUDA" device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 7 }} runtime_version {{ major: 12 minor: 8 }}
        """


_KIB = 1024
_H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability=9,
    cores=132,
    fpus=128,
    shared_bytes=228 * _KIB,
    memory_bytes=84_942_979_072,
    memory_bytes_per_sec=3_352_320_000_000,
    l2_bytes=50 * _KIB**2,
    clock_ghz=1.98,
)
# By the first part of a topology's name.
GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        cores=108,
        fpus=64,
        shared_bytes=164 * _KIB,
        memory_bytes=85_100_068_864,
        memory_bytes_per_sec=2_039_040_000_000,
        l2_bytes=40 * _KIB**2,
        clock_ghz=1.41,
    ),
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100,  # With other memory.
        name="NVIDIA H200 141GB HBM3e",
        memory_bytes=151_397_597_184,
        memory_bytes_per_sec=4_800_000_000_000,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=10,
        cores=148,
        fpus=128,
        shared_bytes=228 * _KIB,
        memory_bytes=191_514_411_008,
        memory_bytes_per_sec=7_672_320_000_000,
        l2_bytes=132_644_864,
        clock_ghz=1.965,
    ),
    "gb200": Gpu(
        name="NVIDIA GB200",
        capability=10,
        cores=152,
        fpus=128,
        shared_bytes=228 * _KIB,
        memory_bytes=197_897_748_480,
        memory_bytes_per_sec=7_928_064_000_000,
        l2_bytes=135_528_448,
        clock_ghz=2.062,
    ),
}
