"""Several processes, each with its own devices, run one program.

Every process joins the others before JAX starts, then makes, compiles and calls the same programs
in the same order, each with the same batch or with its own rows of it.

Left to itself, JAX aborts a process when another one is gone. Here each process names the one that
is gone in one line, and exits with EXIT_STATUS. coordination.py says how it learns of a death; if a
host is gone that cannot even end its connections, heartbeats are missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import storage
from lingvo_gshard.spmd import coordination, environment, jax_private

# The exit status of a process that ends because another one has (sysexits.h: unavailable).
EXIT_STATUS = 69
_PREFIX = "lingvo_gshard/"  # Of keys and barriers in JAX's coordination service.
_FAILURES = f"{_PREFIX}failures/"
_DEVICES = f"{_PREFIX}devices/"
_WATCH_PORT = f"{_PREFIX}watch_port"
_POLL_SECS = 1.0
_MINUTE_MS = 60_000
_DAY_MS = 86_400_000


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that take part."""

    coordinator: str  # `host:port` of process 0, which the others can reach.
    num_processes: int
    process_id: int  # This process's number, from 0.
    timeout_secs: int = 300  # How long to wait for the others.
    heartbeat_timeout_secs: int = 20  # A process that sends none for so long counts as dead.

    def __post_init__(self) -> None:
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ValueError(
                f"Processes: the coordinator must be host:port, got {self.coordinator!r}."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"Processes: process_id must be 0 to {self.num_processes - 1}, "
                f"got {self.process_id}."
            )


def detected(port: int | None, timeout_secs: int) -> Processes:
    """The processes that Slurm, Open MPI, Kubernetes or Cloud TPU started together with this one.

    `port` is that of process 0; by default JAX derives it from the job. Raises ValueError if there
    is no such cluster. If it does not answer, prints one line and exits with EXIT_STATUS.
    """
    if port is not None:
        os.environ["JAX_COORDINATOR_PORT"] = str(port)
    try:
        coordinator, count, index = jax_private.detected_processes(timeout_secs)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        print(f"--cluster=auto: the cluster did not answer: {reason}", file=sys.stderr)
        sys.exit(EXIT_STATUS)
    if coordinator is None or count is None or index is None:
        raise ValueError(
            "--cluster=auto: neither Slurm, Open MPI, Kubernetes (which needs the package "
            "kubernetes) nor Cloud TPU started this process; start it by srun or mpirun, or give "
            "--coordinator, --num_processes and --process_id."
        )
    return Processes(coordinator, count, index, timeout_secs=timeout_secs)


@contextlib.contextmanager
def joined(processes: Processes) -> Iterator[None]:
    """Joins the processes: jax.devices() are then those of all, process 0's first.

    CPU devices communicate through Gloo. On leaving, each process waits for all others.

    Prints one line and exits with status 1 if the processes have different numbers of devices, or
    with EXIT_STATUS if not all of them come in time or one dies or fails. If this process fails, it
    prints its own error in one line and exits with status 1 at once: to leave in order, it would
    have to wait for the others, and they wait for it in a collective. Raises RuntimeError if JAX
    has started already.
    """
    watch = _Watch(processes)
    watch.join()
    watch.check_devices()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        if _may_be_the_others_fault(error):
            time.sleep(processes.heartbeat_timeout_secs + 5)  # If so, the watch ends this process.
        watch.fail(" ".join((str(error) or repr(error)).split()))
    finally:
        watch.leave()


def _may_be_the_others_fault(error: BaseException | None) -> bool:
    """Whether XLA has failed, as a collective does when another process is gone."""
    while error is not None:
        # Some arrive as a ValueError, but all of XLA's errors begin with a status code.
        if isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Watch:
    """Ends this process when another one dies or fails."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._id = processes.process_id
        self._client: Any = None
        self._service: subprocess.Popen[str] | None = None  # Process 0 has one.
        self._leaves = False
        self._exits = threading.Lock()  # Only one thread ends this process.

    def join(self) -> None:
        """Starts JAX's distributed runtime, and watches the others from then on."""
        coordinator, timeout_secs = self._processes.coordinator, self._processes.timeout_secs
        late = f"not all {self._processes.num_processes} processes came to {coordinator} within "
        timer = threading.Timer(timeout_secs, self._end, [f"{late}{timeout_secs} s"])
        timer.daemon = True
        timer.start()

        watch_port = self._start_service() if self._id == 0 else None
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        self._client = jax_private.join(
            coordinator,
            self._processes.num_processes,
            self._id,
            init_timeout_secs=2 * timeout_secs,  # JAX would abort; the timer comes first.
            heartbeat_timeout_secs=self._processes.heartbeat_timeout_secs,
        )
        if watch_port is not None:
            self._client.key_value_set(_WATCH_PORT, watch_port)

        host = coordinator.rpartition(":")[0].strip("[]")
        port = int(self._client.blocking_key_value_get(_WATCH_PORT, timeout_secs * 1000))
        connection = coordination.watch(host, port, self._id)
        timer.cancel()

        _start_thread(self._watch_deaths, connection)
        _start_thread(self._watch_heartbeats)
        _start_thread(self._watch_failures)

    def check_devices(self) -> None:
        """Ends every process with one line unless all have the same number of devices."""
        with environment.quiet_stderr():  # JAX starts.
            count = jax.local_device_count()
        self._client.key_value_set(f"{_DEVICES}{self._id:08}", str(count))
        self._client.wait_at_barrier(f"{_PREFIX}counted", _DAY_MS)
        counts = [int(count) for _, count in sorted(self._client.key_value_dir_get(_DEVICES))]
        if len(set(counts)) > 1:
            each = ", ".join(f"process {i} has {count}" for i, count in enumerate(counts))
            why = f"the processes have different numbers of devices: {each}; give each the same."
            self._exit(f"Process {self._id} ends: {why}", 1)

    def fail(self, reason: str) -> None:
        """Tells the others why this process ends, and exits with status 1."""
        self._tell(f"process {self._id} has failed: {reason}")
        self._exit(f"Process {self._id} of {self._processes.num_processes} ends: {reason}", 1)

    def leave(self) -> None:
        """Waits for all processes and shuts JAX's distributed runtime down, process 0's last."""
        self._client.wait_at_barrier(f"{_PREFIX}done", _DAY_MS)
        self._leaves = True
        self._client.wait_at_barrier(f"{_PREFIX}leaves", _MINUTE_MS)  # Now no process watches.
        while self._id == 0 and len(self._live()) > 1:
            time.sleep(0.01)
        jax.distributed.shutdown()
        if self._service is not None:
            self._service.communicate("done\n")

    def _live(self) -> dict[int, int]:
        """The live processes' incarnation numbers; waits until each of them calls this."""
        return self._client.get_live_nodes(list(range(self._processes.num_processes)))

    def _watch_deaths(self, connection: socket.socket) -> None:
        while (process := coordination.read_death(connection)) is not None:
            self._end(f"process {process} has died")
        self._end("the host of process 0 is gone")

    def _watch_failures(self) -> None:
        while not self._leaves:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for key, failure in self._client.key_value_dir_get(_FAILURES):
                    if key != f"{_FAILURES}{self._id}":
                        self._end(failure)
            time.sleep(_POLL_SECS)

    def _watch_heartbeats(self) -> None:
        first: dict[int, int] = {}
        while not self._leaves:
            # An error means that the service is gone, which ends the watch, or this one leaves.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                live = self._live()
                first = first or live
                for process in range(self._processes.num_processes):
                    if process not in live or live[process] != first.get(process):
                        self._end(f"process {process} has died")
            time.sleep(_POLL_SECS)

    def _tell(self, failure: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_FAILURES}{self._id}", failure)

    def _end(self, why: str) -> None:
        if not self._leaves:
            self._exit(f"Process {self._id} ends: {why}. Start all of them again.", EXIT_STATUS)

    def _exit(self, line: str, status: int) -> None:
        self._exits.acquire()
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)
        if self._id == 0 or status != EXIT_STATUS:
            time.sleep(3)  # The others read why it ends, and do not take its end for the cause.
        os._exit(status)

    def _start_service(self) -> str:
        """Starts JAX's coordination service; returns the port of its watches.

        Raises ValueError if it cannot listen on the coordinator's port.
        """
        _, _, port = self._processes.coordinator.rpartition(":")
        numbers = (port, self._processes.num_processes, self._processes.heartbeat_timeout_secs)
        self._service = subprocess.Popen(
            [sys.executable, "-m", coordination.__name__, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # gRPC and JAX warn of what is meant: that processes may leave and come.
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        )
        assert self._service.stdout is not None
        answer = self._service.stdout.readline().strip()
        if not answer.isdigit():
            reason = answer or "the coordination service has ended"
            raise ValueError(f"--coordinator={self._processes.coordinator}: {reason}.")
        return answer


def _start_thread(target: Callable[..., None], *args: Any) -> None:
    """Runs a function in a thread that ends with the process."""
    threading.Thread(target=target, args=args, daemon=True).start()


def index() -> int:
    """This process's number, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this is process 0, which writes the files that all processes share."""
    return index() == 0


def check_shared(folder: os.PathLike[str]) -> None:
    """Raises ValueError if there are several processes, each with its own copy of a folder."""
    there = storage.origin(folder)
    if jax.process_count() > 1 and there != storage.path(folder):
        raise ValueError(f"{there}: several processes need a folder on a disk that they share.")


def largest(values: Sequence[int]) -> list[int]:
    """Each value's maximum over the processes; all of them must call it, in the same order."""
    gathered = multihost_utils.process_allgather(np.array(values, np.int32))
    return np.max(gathered, axis=0).tolist()


def of_first(value: int) -> int:
    """Process 0's value, in every process; all of them must call it, in the same order."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def wait_for_all() -> None:
    """Returns once every process has called it."""
    of_first(0)


def to_host(tree: NestedMap) -> NestedMap:
    """Every array whole, as a numpy array, in every process; all processes must call it."""
    return tree.Transform(
        lambda leaf: (
            np.asarray(leaf)
            if leaf.is_fully_replicated or leaf.is_fully_addressable
            else multihost_utils.process_allgather(leaf, tiled=True)
        )
    )
