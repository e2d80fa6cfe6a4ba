"""The figures that XLA needs to compile for an absent GPU, from its GpuTargetConfigProtos."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as XLA's compiler sees it."""

    name: str  # NVIDIA's name, as a driver reports it.
    capability: int  # The major number of its CUDA compute capability.
    cores: int  # The number of streaming multiprocessors.
    fpus: int  # The number of float32 units of each multiprocessor.
    shared_kib: int  # Each multiprocessor's shared memory; a block may use 1 KiB less.
    memory_bytes: int  # The size of its high-bandwidth memory.
    memory_bytes_per_sec: float
    l2_kib: int  # The size of its level 2 cache.
    clock_ghz: float  # Its highest clock rate.
    minor: int = 0  # The minor number of its compute capability.

    def target_config(self) -> str:
        """Returns the GpuTargetConfigProto as text.

        Values that all of these GPUs share are literals in the text.
        """
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              shared_memory_per_block: 49152 shared_memory_per_core: {1024 * self.shared_kib}
              shared_memory_per_block_optin: {1024 * (self.shared_kib - 1)}
              core_count: {self.cores} fpus_per_core: {self.fpus}
              memory_bandwidth: {self.memory_bytes_per_sec:.0f}
              l2_cache_size: {1024 * self.l2_kib}
              device_memory_size: {self.memory_bytes} clock_rate_ghz: {self.clock_ghz}
              cuda_compute_capability {{ major: {self.capability} minor: {self.minor} }}
            }}
            platform_name: "CUDA" device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 7 }} runtime_version {{ major: 12 minor: 8 }}
        """


# The GPUs by the first part of a topology's name.
GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        cores=108,
        fpus=64,
        shared_kib=164,
        memory_bytes=85_100_068_864,
        memory_bytes_per_sec=2.03904e12,
        l2_kib=40960,
        clock_ghz=1.41,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability=9,
        cores=132,
        fpus=128,
        shared_kib=228,
        memory_bytes=84_942_979_072,
        memory_bytes_per_sec=3.35232e12,
        l2_kib=51200,
        clock_ghz=1.98,
    ),
    "h200": Gpu(
        name="NVIDIA H200 141GB HBM3e",
        capability=9,
        cores=132,
        fpus=128,
        shared_kib=228,
        memory_bytes=151_397_597_184,
        memory_bytes_per_sec=4.8e12,
        l2_kib=51200,
        clock_ghz=1.98,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=10,
        cores=148,
        fpus=128,
        shared_kib=228,
        memory_bytes=191_514_411_008,
        memory_bytes_per_sec=7.67232e12,
        l2_kib=129536,
        clock_ghz=1.965,
    ),
    "gb200": Gpu(
        name="NVIDIA GB200",
        capability=10,
        cores=152,
        fpus=128,
        shared_kib=228,
        memory_bytes=197_897_748_480,
        memory_bytes_per_sec=7.928064e12,
        l2_kib=132352,
        clock_ghz=2.062,
    ),
    "gb300": Gpu(
        name="NVIDIA GB300",
        capability=10,
        cores=152,
        fpus=128,
        shared_kib=228,
        memory_bytes=297_021_079_552,
        memory_bytes_per_sec=7.928064e12,
        l2_kib=132352,
        clock_ghz=2.07,
        minor=3,
    ),
    "b300": Gpu(
        name="NVIDIA B300",
        capability=10,
        cores=158,
        fpus=128,
        shared_kib=228,
        memory_bytes=297_021_865_984,
        memory_bytes_per_sec=7.936e12,
        l2_kib=132352,
        clock_ghz=1.965,
        minor=3,
    ),
}
