"""Functions that JAX lacks in public: the available devices, and cooperating processes."""

from typing import Any

from xla_spmd.runtime import jax_names


def num_tpu_chips() -> int:
    """Returns the number of attached TPU chips, without starting JAX."""
    count = jax_names.get("jax._src.hardware_utils.num_available_tpu_chips_and_device_id")
    chips: int = count()[0]
    return chips


def has_nvidia_gpu() -> bool:
    """Returns whether an NVIDIA GPU is visible, without starting JAX."""
    is_visible: bool = jax_names.get("jax._src.hardware_utils.has_visible_nvidia_gpu")()
    return is_visible


def has_started() -> bool:
    """Returns whether JAX has started: its platform and number of devices are then fixed."""
    are_initialized: bool = jax_names.get("jax._src.xla_bridge.backends_are_initialized")()
    return are_initialized


def detected_processes(timeout_secs: int) -> tuple[str | None, int | None, int | None]:
    """Returns the cluster's coordinator, its number of processes, and this process's index."""
    detect = jax_names.get("jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params")
    coordinator, count, index, _ = detect(None, None, None, None, None, timeout_secs)
    return coordinator, count, index


def coordination_service(address: str, num_processes: int, heartbeat_timeout_secs: int) -> Any:
    """Starts JAX's coordination service, which lives as long as the returned object.

    It is recoverable: it lists the live processes and does not abort them when one of them dies.
    """
    start = jax_names.get("jax._src.lib._jax.get_distributed_runtime_service")
    return start(address, num_processes, heartbeat_timeout=heartbeat_timeout_secs, recoverable=True)


def join(
    address: str,
    num_processes: int,
    process_id: int,
    init_timeout_secs: int,
    heartbeat_timeout_secs: int,
) -> Any:
    """Joins JAX's distributed runtime, whose service runs elsewhere; returns its client.

    jax.distributed.initialize does the same, but starts the service in process 0.
    """
    make_client = jax_names.get("jax._src.lib._jax.get_distributed_runtime_client")
    state = jax_names.get("jax._src.distributed.global_state")

    client = make_client(
        address,
        process_id,
        init_timeout=init_timeout_secs,
        use_compression=True,
        heartbeat_timeout=heartbeat_timeout_secs,
    )
    client.connect()

    # jax.devices(), jax.process_index() and jax.distributed.shutdown() read this state.
    state.client = client
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    return client
