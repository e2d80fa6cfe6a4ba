"""The figures that XLA needs to compile for an absent GPU, from its GpuTargetConfigProtos."""

import dataclasses

from xla_plan.machines import published


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
GPUS = {name: Gpu(**figures["compiler"]) for name, figures in published.GPUS.items()}
