"""The names of JAX's inside that this project uses, since JAX has no public ones for them.

Checked with jax 0.10.2 and 0.12.0.1. The tests of spmd/ fail where another version differs.
"""

from typing import Any

from jax._src import clusters, distributed, hardware_utils, xla_bridge
from jax._src.lib import _jax, xla_client
from jax._src.sharding_impls import num_addressable_indices, parse_flatten_op_sharding

__all__ = ["num_addressable_indices", "parse_flatten_op_sharding"]


def num_tpu_chips() -> int:
    """Returns the number of TPU chips that are attached, without starting JAX."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0]


def has_nvidia_gpu() -> bool:
    """Returns whether an NVIDIA GPU is visible, without starting JAX."""
    return hardware_utils.has_visible_nvidia_gpu()


def has_started() -> bool:
    """Returns whether JAX has started: its platform and number of devices are then fixed."""
    return xla_bridge.backends_are_initialized()


def hlo_sharding(serialized: bytes) -> tuple[str, Any]:
    """Returns the type of a serialized OpSharding in small letters, and its HloSharding.

    TensorFlow's annotations hold such bytes. `other` is one that is tiled.
    """
    sharding = xla_client.OpSharding()
    sharding.ParseFromString(serialized)
    return sharding.type.name.lower(), xla_client.HloSharding.from_proto(sharding)


def detected_processes(timeout_secs: int) -> tuple[str | None, int | None, int | None]:
    """Returns coordinator, number of processes and this one's, as the cluster tells them."""
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    coordinator, count, index, _ = detect(None, None, None, None, None, timeout_secs)
    return coordinator, count, index


def coordination_service(address: str, num_processes: int, heartbeat_timeout_secs: int) -> Any:
    """Starts JAX's coordination service, which lives as long as what is returned.

    It is recoverable: it lists the live processes and does not abort them when one of them dies.
    """
    return _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=heartbeat_timeout_secs, recoverable=True
    )


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
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=init_timeout_secs,
        use_compression=True,
        heartbeat_timeout=heartbeat_timeout_secs,
    )
    client.connect()

    # jax.devices(), jax.process_index() and jax.distributed.shutdown() look here.
    state = distributed.global_state
    state.client = client
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    return client
