"""Several processes, each with its own devices, run one program: the code of one process.

Every process calls `initialize` before JAX starts, then exports, compiles and calls the same
programs in the same order, with the same arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import peers


@dataclasses.dataclass(frozen=True)
class Processes:
    """Who takes part.

    Attributes:
      coordinator: `host:port` of process 0, which the others can reach.
      num_processes: all of them.
      process_id: this one's place, from 0.
      timeout_secs: how long to wait for the others.
      heartbeat_timeout_secs: how long one may be silent before the others take it for dead.

    Raises:
      ValueError: no `host:port`, or a place that is none.
    """

    coordinator: str
    num_processes: int
    process_id: int
    timeout_secs: int = 300
    heartbeat_timeout_secs: int = 120  # Compiling may hold Python's lock for long.

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"Processes: the coordinator must be host:port, got {self.coordinator!r}."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"Processes: process_id must be 0 to {self.num_processes - 1}, "
                f"got {self.process_id}."
            )


def initialize(processes: Processes) -> None:
    """Joins the processes: jax.devices() are then everybody's, process 0's first.

    CPU devices talk to each other through Gloo.

    Raises:
      RuntimeError: JAX has started already. If not all come in time, JAX aborts the process.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        processes.coordinator,
        num_processes=processes.num_processes,
        process_id=processes.process_id,
        initialization_timeout=processes.timeout_secs,
        heartbeat_timeout_seconds=processes.heartbeat_timeout_secs,
    )


@contextlib.contextmanager
def joined(processes: Processes) -> Iterator[None]:
    """Joins the processes, which watch each other, and parts from them in order at the end.

    If not all come in time, this process says so and ends with peers.EXIT_STATUS.
    On an error this process ends at once, and tells it in one line: it must not say farewell as
    others do, who would wait for it in a collective, and it for them. They end too, with
    peers.EXIT_STATUS, as they do when this one is killed.

    Raises:
      RuntimeError: as initialize.
    """
    host, _, port = processes.coordinator.rpartition(":")
    address = host.strip("[]"), int(port)
    with contextlib.ExitStack() as stack:
        through = processes.coordinator
        if processes.process_id > 0:
            through = stack.enter_context(peers.relayed(address))
        with _all_come_in_time(processes):
            initialize(
                dataclasses.replace(
                    processes,
                    coordinator=through,
                    # JAX's own watches come second.
                    timeout_secs=2 * processes.timeout_secs,
                    heartbeat_timeout_secs=2 * processes.heartbeat_timeout_secs,
                )
            )
        watch = _watch(processes, host.strip("[]"))
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if logging.getLogger().isEnabledFor(logging.DEBUG):
                traceback.print_exc()
            reason = " ".join((str(error) or repr(error)).split())
            watch.fail(reason)
            sys.stdout.flush()
            print(
                f"Process {processes.process_id} of {processes.num_processes} ends: {reason}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        finally:
            jax.distributed.shutdown()  # Waits for the others.
            watch.leave()


@contextlib.contextmanager
def _all_come_in_time(processes: Processes) -> Iterator[None]:
    """Ends this process, whatever its main thread does, unless it is left within timeout_secs."""
    late = threading.Timer(processes.timeout_secs, _end_alone, [processes])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _end_alone(processes: Processes) -> None:
    print(
        f"Process {processes.process_id} ends: not all {processes.num_processes} processes came to "
        f"{processes.coordinator} within {processes.timeout_secs} s. Start all of them again.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(peers.EXIT_STATUS)


def _watch(processes: Processes, host: str) -> peers.Watch:
    """Of process 0 over all others, or of another over process 0."""
    if is_first():
        listener = peers.listen()
        of_first(listener.getsockname()[1])
        found = peers.accepted(listener, processes.num_processes, processes.timeout_secs)
    else:
        port = of_first(0)
        found = peers.connected((host, port), processes.process_id, processes.timeout_secs)
    return peers.Watch(processes.process_id, found, processes.heartbeat_timeout_secs)


def is_first() -> bool:
    """Whether this is process 0, the one that writes what is written once."""
    return jax.process_index() == 0


def largest(values: Sequence[int]) -> list[int]:
    """Each value's maximum over the processes; all of them must call it, in the same order."""
    if jax.process_count() == 1:
        return list(values)
    gathered = multihost_utils.process_allgather(np.array(values, np.int32))
    return np.max(gathered, axis=0).tolist()


def of_first(value: int) -> int:
    """Process 0's value, in every process; all of them must call it, in the same order."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def to_host(tree: NestedMap) -> NestedMap:
    """The whole of every array as numpy arrays, in every process; all processes must call it."""
    return tree.Transform(
        lambda leaf: (
            np.asarray(leaf)
            if leaf.is_fully_replicated or leaf.is_fully_addressable
            else multihost_utils.process_allgather(leaf, tiled=True)
        )
    )
