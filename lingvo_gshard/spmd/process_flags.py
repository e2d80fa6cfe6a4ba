"""The processes that work together, as their flags name them; checked before JAX is imported."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process's place among the cooperating processes.

    Raises ValueError if the coordinator is not `host:port`, or for a number out of its range.
    """

    coordinator: str  # `host:port` of process 0, reachable for the others.
    num_processes: int
    process_id: int  # This process's number, from 0.
    timeout_secs: int = 300  # How long to wait for the others.
    heartbeat_timeout_secs: int = 20  # A process without heartbeats for this long is dead.

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError(
                f"--coordinator={self.coordinator}: an IPv6 address needs brackets, as in "
                f"[{host}]:{port}."
            )
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                f"--coordinator={self.coordinator}: expected HOST:PORT, the address of process 0."
            )

        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"--process_id={self.process_id}: expected 0 to {self.num_processes - 1} for "
                f"--num_processes={self.num_processes}."
            )
