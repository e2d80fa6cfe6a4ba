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
from lingvo_gshard.files import lock, storage
from lingvo_gshard.spmd import coordination, environment, jax_private, padded
from lingvo_gshard.spmd.padded import PaddedArray

# The exit status of a process that ends because another one has (sysexits.h: unavailable).
EXIT_STATUS = 69
# Keys and barriers in JAX's coordination service.
_FAILURES = "lingvo_gshard/failures/"  # By process: why it has failed.
_DEVICES = "lingvo_gshard/devices/"  # By process: its number of devices.
_WATCH_PORT = "lingvo_gshard/watch_port"
_COUNTED = "lingvo_gshard/counted"
_DONE = "lingvo_gshard/done"
_LEAVES = "lingvo_gshard/leaves"

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
    """Returns what Slurm, Open MPI, Kubernetes or Cloud TPU started together with this process.

    `port` is that of process 0; by default JAX derives it from the job. Raises ValueError if there
    is no such cluster. If it does not answer, prints one line and exits with EXIT_STATUS.
    """
    # JAX looks for the port in the environment.
    if port is not None:
        os.environ["JAX_COORDINATOR_PORT"] = str(port)

    # Kubernetes, for one, is asked over the network.
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
    membership = _Membership(processes)
    membership.join()
    membership.check_devices()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        if _is_from_xla(error):
            # If another process is the cause, a thread that watches ends this one meanwhile.
            time.sleep(processes.heartbeat_timeout_secs + 5)
        membership.fail(" ".join((str(error) or repr(error)).split()))
    finally:
        membership.leave()


def _is_from_xla(error: BaseException | None) -> bool:
    """Returns whether XLA has failed, as a collective does when another process is gone."""
    while error is not None:
        # Some arrive as a ValueError, but all of XLA's errors begin with a status code.
        if isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Membership:
    """This process among the others: it watches them, and ends when one of them dies or fails."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._id = processes.process_id
        self._client: Any = None  # Of JAX's coordination service.
        self._service: subprocess.Popen[str] | None = None  # Process 0 starts it.
        self._leaves = False
        self._exits = threading.Lock()  # Only one thread ends this process.

    def join(self) -> None:
        """Starts JAX's distributed runtime, and watches the others from then on."""
        coordinator = self._processes.coordinator
        timeout_secs = self._processes.timeout_secs
        # Before all have joined, no service could spread a reason: each has a timer of its own.
        late = (
            f"not all {self._processes.num_processes} processes came to {coordinator} within "
            f"{timeout_secs} s"
        )
        timer = threading.Timer(timeout_secs, self._end, [late])
        timer.daemon = True
        timer.start()

        # JAX's own way to join would start its service inside process 0.
        watch_port = self._start_service() if self._id == 0 else None
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        self._client = jax_private.join(
            coordinator,
            self._processes.num_processes,
            self._id,
            init_timeout_secs=2 * timeout_secs,  # JAX would abort; the timer comes first.
            heartbeat_timeout_secs=self._processes.heartbeat_timeout_secs,
        )

        # Process 0 alone knows the port for the watches.
        if watch_port is not None:
            self._client.key_value_set(_WATCH_PORT, watch_port)
        port = int(self._client.blocking_key_value_get(_WATCH_PORT, timeout_secs * 1000))
        host = coordinator.rpartition(":")[0].strip("[]")
        connection = coordination.watch(host, port, self._id)
        timer.cancel()

        # Three ways to learn that there is nothing left to wait for, from the quickest.
        _start_thread(self._await_deaths, connection)
        _start_thread(self._await_missed_heartbeats)
        _start_thread(self._await_failures)

    def check_devices(self) -> None:
        """Ends every process with one line unless all have the same number of devices."""
        with environment.quiet_stderr():  # JAX starts.
            own_count = jax.local_device_count()

        # Zeros make the order of the keys that of the processes.
        self._client.key_value_set(f"{_DEVICES}{self._id:08}", str(own_count))
        self._client.wait_at_barrier(_COUNTED, _DAY_MS)
        entries = sorted(self._client.key_value_dir_get(_DEVICES))
        counts = [int(count) for _, count in entries]

        # Every process finds the same, so each of them says it and ends.
        if len(set(counts)) > 1:
            listed = ", ".join(f"process {i} has {count}" for i, count in enumerate(counts))
            self._exit(
                f"Process {self._id} ends: the processes have different numbers of devices: "
                f"{listed}; give each the same.",
                1,
            )

    def fail(self, reason: str) -> None:
        """Tells the others why this process ends, and exits with status 1."""
        # Without the service, the others end of themselves.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(
                f"{_FAILURES}{self._id}", f"process {self._id} has failed: {reason}"
            )
        self._exit(f"Process {self._id} of {self._processes.num_processes} ends: {reason}", 1)

    def leave(self) -> None:
        """Waits for all processes and shuts JAX's distributed runtime down, process 0's last."""
        self._client.wait_at_barrier(_DONE, _DAY_MS)
        self._leaves = True
        # Once all have come here, none takes the end of another for its death.
        self._client.wait_at_barrier(_LEAVES, _MINUTE_MS)

        # The others' clients would report an error if the service ended before them.
        while self._id == 0 and len(self._live_processes()) > 1:
            time.sleep(0.01)
        jax.distributed.shutdown()
        if self._service is not None:
            self._service.communicate("done\n")

    def _live_processes(self) -> dict[int, int]:
        """Returns the live processes' incarnation numbers; waits until each of them calls this."""
        return self._client.get_live_nodes(list(range(self._processes.num_processes)))

    def _await_deaths(self, connection: socket.socket) -> None:
        while (process := coordination.read_death(connection)) is not None:
            self._end(f"process {process} has died")
        self._end("the host of process 0 is gone")

    def _await_failures(self) -> None:
        while not self._leaves:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                for key, failure in self._client.key_value_dir_get(_FAILURES):
                    if key != f"{_FAILURES}{self._id}":
                        self._end(failure)
            time.sleep(_POLL_SECS)

    def _await_missed_heartbeats(self) -> None:
        at_start: dict[int, int] = {}
        while not self._leaves:
            # An error means that the service is gone, which ends the watch, or this one leaves.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                live = self._live_processes()
                if not at_start:
                    at_start = live

                # Another incarnation is a process that was started again alone.
                for process in range(self._processes.num_processes):
                    if process not in live or live[process] != at_start.get(process):
                        self._end(f"process {process} has died")
            time.sleep(_POLL_SECS)

    def _end(self, reason: str) -> None:
        """Exits with EXIT_STATUS, unless the work is done."""
        if not self._leaves:
            self._exit(f"Process {self._id} ends: {reason}. Start all of them again.", EXIT_STATUS)

    def _exit(self, line: str, status: int) -> None:
        """Prints a line and ends this process at once, from any thread."""
        self._exits.acquire()
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)

        # The others read why it ends, and do not take its end for the cause.
        if self._id == 0 or status != EXIT_STATUS:
            time.sleep(3)
        os._exit(status)

    def _start_service(self) -> str:
        """Starts JAX's coordination service; returns the port of its watches.

        Raises ValueError if it cannot listen on the coordinator's port.
        """
        port = self._processes.coordinator.rpartition(":")[2]

        # In a session of its own, so that a signal to this process's group does not end it. -P: it
        # finds modules where this process does, and not also in the current folder.
        self._service = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                coordination.__name__,
                port,
                str(self._processes.num_processes),
                str(self._processes.heartbeat_timeout_secs),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # gRPC and JAX warn of what is meant: that processes may leave and come.
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        )

        # Its first line is the port, or what kept it from starting.
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
    """Returns this process's number, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Returns whether this is process 0, which writes the files that all processes share."""
    return index() == 0


def locked(target: os.PathLike[str], doing: str) -> contextlib.AbstractContextManager[None]:
    """Locks what all processes write, which process 0 does for all; see lock.held."""
    if not is_first():
        return contextlib.nullcontext()
    return lock.held(target, doing)


def check_shared(folder: os.PathLike[str]) -> None:
    """Raises ValueError if there are several processes, each with its own copy of a folder."""
    # A bucket's copy on this machine is nobody else's.
    origin = storage.origin(folder)
    if jax.process_count() > 1 and origin != storage.path(folder):
        raise ValueError(f"{origin}: several processes need a folder on a disk that they share.")


def largest(values: Sequence[int]) -> list[int]:
    """Returns each value's maximum over the processes; all must call it, in the same order."""
    gathered = multihost_utils.process_allgather(np.array(values, np.int32))
    return np.max(gathered, axis=0).tolist()


def of_first(value: int) -> int:
    """Returns process 0's value; all processes must call it, in the same order."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def wait_for_all() -> None:
    """Returns once every process has called it."""
    of_first(0)


def to_host(tree: NestedMap) -> NestedMap:
    """Returns every array whole, as a numpy array; all processes must call it."""
    return tree.Transform(_whole)


def _whole(array: jax.Array | PaddedArray) -> np.ndarray:
    if isinstance(array, PaddedArray):
        return padded.without_padding(_whole(array.padded), array.shape)

    # This process may hold all of it already.
    if array.is_fully_replicated or array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
