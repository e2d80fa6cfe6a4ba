"""Several processes, each with its own devices, run one program.

Every process joins the others before JAX starts, and then makes, compiles and calls the same
programs in the same order, each with the same batch or with its own rows of it.

By default, JAX aborts a process when another process is gone. Here each process reports which
process is gone, in one line, and exits with EXIT_STATUS. coordination.py describes how it learns of
a death; if a host disappears without closing its connections, its heartbeats are missed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import coordination, padded
from lingvo_gshard.spmd.padded import PaddedArray
from lingvo_gshard.spmd.process_flags import Processes
from xla_spmd.files import lock
from xla_spmd.runtime import environment, jax_runtime, log_lines, progress

# The exit status of a process that ends because another has ended (sysexits.h: unavailable).
EXIT_STATUS = 69
# Keys and barriers in JAX's coordination service.
_FAILURES = "lingvo_gshard/failures/"  # The reason why each process failed.
_COUNTS = "lingvo_gshard/counts/"  # How many devices and processes each one counts.
_COUNTED = "lingvo_gshard/counted"
_ALIKE = "lingvo_gshard/alike/"  # What process 0 has, by name.
_COMPARED = "lingvo_gshard/compared"
_DONE = "lingvo_gshard/done"
_LEAVES = "lingvo_gshard/leaves"

_POLL_SECS = 1.0
_MINUTE_MS = 60_000
_DAY_MS = 86_400_000


_membership: _Membership | None = None  # Set while this process works with others.


def detected(port: int | None, timeout_secs: int) -> Processes:
    """Returns the processes that Slurm, Open MPI, Kubernetes or Cloud TPU started with this one.

    `port` is process 0's port; by default JAX derives it from the job. Raises ValueError if no such
    cluster started this process. If the cluster does not answer, prints one line and exits with
    EXIT_STATUS.
    """
    # JAX reads the port from the environment.
    if port is not None:
        os.environ["JAX_COORDINATOR_PORT"] = str(port)

    # Some clusters, such as Kubernetes, are asked over the network.
    try:
        coordinator, count, index = jax_runtime.detected_processes(timeout_secs)
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
    """Joins the processes: jax.devices() then lists the devices of all, process 0's first.

    CPU devices communicate through Gloo. On leaving, each process waits for all others.

    Raises ValueError if another process has this process's number, and RuntimeError if JAX has
    started already.

    Prints one line and exits with status 1 if the processes count different numbers of devices or
    of processes, or with EXIT_STATUS if a process does not join in time, dies or fails. If this
    process fails, it prints its own error in one line and exits with status 1 at once, because an
    orderly exit would wait for the others, while they wait for this process in a collective.
    """
    global _membership
    membership = _Membership(processes)
    membership.join()
    membership.check_counts()
    if processes.process_id > 0:
        progress.hide()
    _membership = membership
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        if _is_from_xla(error):
            # If another process is the cause, the watching thread ends this process meanwhile.
            time.sleep(processes.heartbeat_timeout_secs + 5)
        membership.fail(" ".join((str(error) or repr(error)).split()))
    finally:
        _membership = None
        membership.leave()


def _is_from_xla(error: BaseException | None) -> bool:
    """Returns whether XLA has failed, as a collective does when a process is gone."""
    while error is not None:
        # Some errors arrive as a ValueError, but all of XLA's errors begin with a status code.
        if isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Membership:
    """This process among the others: it watches them, and ends when one of them dies or fails."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._id = processes.process_id
        self._client: Any = None  # The client of JAX's coordination service.
        self._service: subprocess.Popen[str] | None = None  # Process 0 starts it.
        self._messages: threading.Thread | None = None  # It shows the service's messages.
        self._leaves = False
        self._exits = threading.Lock()  # Only one thread ends this process.

    def join(self) -> None:
        """Starts JAX's distributed runtime, and watches the other processes.

        Raises ValueError if the service cannot start, if another process has the same number, or if
        process 0 counts too few processes for this number.
        """
        coordinator = self._processes.coordinator
        timeout_secs = self._processes.timeout_secs
        # Until all have joined, the service cannot spread a reason, so each process has a timer.
        late = (
            f"not all {self._processes.num_processes} processes came to {coordinator} within "
            f"{timeout_secs} s"
        )
        timer = threading.Timer(timeout_secs, self._end, [late])
        timer.daemon = True
        timer.start()

        try:
            # JAX's own way to join would start the service inside process 0.
            if self._id == 0:
                self._start_service()
            host, _, port = coordinator.rpartition(":")
            watch = coordination.watch(host.strip("[]"), int(port), self._id)
            if self._id >= watch.num_processes:
                raise ValueError(
                    f"The processes have different --num_processes: process 0 has "
                    f"{watch.num_processes}, process {self._id} has "
                    f"{self._processes.num_processes}; give each the same."
                )
            _start_thread(self._await_deaths, watch.connection)

            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            self._client = jax_runtime.join(
                f"{host}:{watch.service_port}",
                self._processes.num_processes,
                self._id,
                init_timeout_secs=2 * timeout_secs,  # JAX would abort; our timer ends first.
                heartbeat_timeout_secs=self._processes.heartbeat_timeout_secs,
            )
        finally:
            timer.cancel()

        # Beside the watch, two slower ways to learn of a lost process.
        _start_thread(self._await_missed_heartbeats)
        _start_thread(self._await_failures)

    def check_counts(self) -> None:
        """Ends every process with one line unless all count as many devices, and processes."""
        with environment.quiet_stderr():  # JAX starts.
            num_devices = jax.local_device_count()
        own = {"numbers of devices": num_devices, "--num_processes": self._processes.num_processes}

        # Zero padding sorts the keys by process.
        for name, count in own.items():
            self._client.key_value_set(f"{_COUNTS}{name}/{self._id:08}", str(count))
        self._client.wait_at_barrier(_COUNTED, _DAY_MS)

        # Every process finds the same difference, so each reports it and ends.
        for name in own:
            entries = sorted(self._client.key_value_dir_get(f"{_COUNTS}{name}/"))
            counts = [int(count) for _, count in entries]
            if len(set(counts)) > 1:
                listed = ", ".join(f"process {i} has {count}" for i, count in enumerate(counts))
                self._exit(
                    f"Process {self._id} ends: the processes have different {name}: {listed}; "
                    "give each the same.",
                    1,
                )

    def check_alike(self, texts: Mapping[str, str]) -> None:
        """Raises ValueError unless process 0 has the same texts; see check_alike below."""
        wait_ms = self._processes.timeout_secs * 1000
        for name, text in texts.items():
            if self._id == 0:
                self._client.key_value_set(f"{_ALIKE}{name}", text)
                continue
            first = self._client.blocking_key_value_get(f"{_ALIKE}{name}", wait_ms)
            if text != first:
                raise ValueError(f"{name} unlike process 0's: {_difference(text, first)}.")

        # A process that computed meanwhile would be aborted with the others.
        self._client.wait_at_barrier(_COMPARED, _DAY_MS)

    def fail(self, reason: str) -> None:
        """Tells the others why this process ends, and exits with status 1."""
        # Without the service, the others end by themselves.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(
                f"{_FAILURES}{self._id}", f"process {self._id} has failed: {reason}"
            )
        self._exit(f"Process {self._id} of {self._processes.num_processes} ends: {reason}", 1)

    def leave(self) -> None:
        """Waits for all processes and shuts JAX's distributed runtime down, process 0's last."""
        self._client.wait_at_barrier(_DONE, _DAY_MS)
        self._leaves = True
        # Once all have arrived here, a process that ends is not taken for dead.
        self._client.wait_at_barrier(_LEAVES, _MINUTE_MS)

        # The others' clients would report an error if the service ended before them.
        while self._id == 0 and len(self._live_processes()) > 1:
            time.sleep(0.01)
        jax.distributed.shutdown()
        if self._service is not None:
            assert self._service.stdin is not None and self._messages is not None
            with contextlib.suppress(BrokenPipeError), self._service.stdin as requests:
                requests.write("done\n")
            self._service.wait()
            self._messages.join()

    def _live_processes(self) -> dict[int, int]:
        """Returns the live processes' incarnation numbers, once each of them calls this."""
        return self._client.get_live_nodes(list(range(self._processes.num_processes)))

    def _await_deaths(self, connection: socket.socket) -> None:
        while (process := coordination.read_death(connection)) is not None:
            self._end_by_death(process)
        self._end("the host of process 0 is gone")

    def _await_failures(self) -> None:
        while not self._leaves:
            self._end_by_failure()
            time.sleep(_POLL_SECS)

    def _end_by_death(self, process: int) -> None:
        """Ends this process because another has died."""
        self._end_by_failure()  # The other may have ended because of it.
        if self._client is None:
            count = self._processes.num_processes
            self._end(f"process {process} ended before all {count} had joined")
        self._end(f"process {process} has died")

    def _end_by_failure(self) -> None:
        """Ends this process if another has told the service why it failed."""
        if self._client is None:  # It has not joined yet.
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for key, failure in self._client.key_value_dir_get(_FAILURES):
                if key != f"{_FAILURES}{self._id}":
                    self._end(failure)

    def _await_missed_heartbeats(self) -> None:
        at_start: dict[int, int] = {}
        while not self._leaves:
            # An error means that the service is gone, which ends the watch, or that this process
            # leaves.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                live = self._live_processes()
                if not at_start:
                    at_start = live

                # A different incarnation is a process that was restarted alone.
                for process in range(self._processes.num_processes):
                    if process not in live or live[process] != at_start.get(process):
                        self._end_by_death(process)
            time.sleep(_POLL_SECS)

    def _end(self, reason: str) -> None:
        """Exits with EXIT_STATUS, unless the work is done."""
        if not self._leaves:
            reason = reason.removesuffix(".")
            self._exit(f"Process {self._id} ends: {reason}. Start all of them again.", EXIT_STATUS)

    def _exit(self, line: str, status: int) -> None:
        """Prints a line and ends this process at once, from any thread."""
        self._exits.acquire()
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)

        # The others need time to read the reason, or they would take this end for the cause.
        if self._id == 0 or status != EXIT_STATUS:
            time.sleep(3)
        os._exit(status)

    def _start_service(self) -> None:
        """Starts JAX's coordination service, or raises ValueError if it cannot start."""
        port = self._processes.coordinator.rpartition(":")[2]

        # A separate session, so that a signal to this process's group does not end it. With -P it
        # finds modules where this process does, but not in the current folder.
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
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        )

        # The service outlives this process, whose end closes the pipe; it then ignores write
        # errors.
        assert self._service.stderr is not None
        self._messages = _start_thread(_show, self._service.stderr)

        # Its first line says that it is ready, or why it did not start.
        assert self._service.stdout is not None
        answer = self._service.stdout.readline().strip()
        if answer != "ready":
            reason = answer or "the coordination service has ended"
            raise ValueError(f"--coordinator={self._processes.coordinator}: {reason}.")


def _start_thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    """Returns a thread that runs a function, and ends with the process."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _show(messages: Iterable[str]) -> None:
    """Writes lines to standard error at once, without the libraries' greetings."""
    for line in messages:
        if not log_lines.is_greeting(line):
            sys.stderr.write(line)
            sys.stderr.flush()


def index() -> int:
    """Returns this process's number, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Returns whether this is process 0, which writes the files that all processes share."""
    return index() == 0


def locked(target: os.PathLike[str], doing: str) -> contextlib.AbstractContextManager[None]:
    """Locks files that process 0 writes for all processes; see lock.held."""
    if not is_first():
        return contextlib.nullcontext()
    return lock.held(target, doing)


def check_alike(texts: Mapping[str, str]) -> None:
    """Checks that all processes have the same texts, such as their settings, by name.

    All of them must call it once, before they compute together. The texts have one or more lines.
    Raises ValueError, which names the first difference, in a process that differs from process 0;
    the others end with it.
    """
    if _membership is not None:
        _membership.check_alike(texts)


def _difference(own: str, first: str) -> str:
    """Returns the first line in which a text differs from process 0's."""
    for line, other in itertools.zip_longest(own.splitlines(), first.splitlines()):
        if line != other:
            return f"{line or 'nothing'} here, {other or 'nothing'} there"
    return "their ends differ"


def largest(values: Sequence[int]) -> list[int]:
    """Returns each value's maximum over the processes; all must call it, in the same order."""
    gathered = multihost_utils.process_allgather(np.array(values, np.int32))
    return np.max(gathered, axis=0).tolist()


def of_first(value: int) -> int:
    """Returns process 0's value; all processes must call it, in the same order."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def num_on_host() -> int:
    """Returns the number of processes on this one's host; all processes must call it."""
    name = np.int32(zlib.crc32(socket.gethostname().encode()) % 2**31)
    names = multihost_utils.process_allgather(name)
    return int(np.sum(names == name))


def wait_for_all() -> None:
    """Returns once every process has called it."""
    of_first(0)


def to_host(tree: NestedMap) -> NestedMap:
    """Returns every array whole, as a numpy array; all processes must call it."""
    return tree.Transform(_whole)


def _whole(array: jax.Array | PaddedArray) -> np.ndarray:
    if isinstance(array, PaddedArray):
        return padded.without_padding(_whole(array.padded), array.shape)

    # This process may already hold the whole array.
    if array.is_fully_replicated or array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
