"""Engines, which run the tasks of a step: by processes of this machine, or by a Dask cluster.

An engine is a function that runs calls without arguments, in any order and perhaps more than once,
and yields after each one. It raises a call's error. Results are written to files (runs.py).
"""

import concurrent.futures
import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xla_spmd.files import child_process
from xla_spmd.runtime import log_lines

Call = Callable[[], None]
Engine = Callable[[Sequence[Call]], Iterator[None]]


def pool(num_workers: int) -> Engine:
    """Returns an engine that uses processes of this machine; one worker is this process itself."""

    def run(calls: Sequence[Call]) -> Iterator[None]:
        # Starting other processes would take longer than they save.
        if num_workers == 1 or len(calls) < 2:
            for call in calls:
                yield call()
            return

        # A process that has loaded TensorFlow cannot be forked safely.
        with concurrent.futures.ProcessPoolExecutor(
            min(num_workers, len(calls)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
        ) as executor:
            try:
                futures = [executor.submit(call) for call in calls]
                for future in concurrent.futures.as_completed(futures):
                    yield future.result()
            except concurrent.futures.BrokenExecutor as error:
                raise ValueError(
                    "a worker has died, perhaps for lack of memory: repeat with fewer --workers"
                ) from error
            finally:
                # If a call fails, the calls that have not begun are cancelled.
                executor.shutdown(wait=False, cancel_futures=True)

    return run


def _begin() -> None:
    """Runs first in a worker process."""
    child_process.end_with_parent()
    log_lines.write_plainly()


@contextlib.contextmanager
def dask(scheduler: str | None, num_workers: int) -> Iterator[Engine]:
    """Yields an engine that uses the workers of the Dask scheduler at HOST:PORT.

    With None, it starts local workers. Raises ValueError if Dask is not installed, or if the
    scheduler does not answer, or stops answering.
    """
    try:
        import distributed
    except ModuleNotFoundError as error:
        raise ValueError("--engine=dask needs Dask: pip install 'lingvo_gshard[dask]'") from error

    # These loggers report errors that are also raised.
    for name in ("distributed", "distributed.client", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    local_workers: dict[str, Any] = {}
    if not scheduler:
        local_workers["n_workers"] = num_workers
        local_workers["threads_per_worker"] = 1
        local_workers["dashboard_address"] = None
    try:
        client = distributed.Client(scheduler, **local_workers)
    except (OSError, ValueError) as error:
        where = scheduler or "this machine"
        raise ValueError(f"no Dask scheduler answers at {where}: {error}") from error

    with client:
        address = client.scheduler_info()["address"]

        def run(calls: Sequence[Call]) -> Iterator[None]:
            # Not pure: otherwise Dask could return an earlier result of an equal call.
            futures = [client.submit(call, pure=False) for call in calls]
            for future in distributed.as_completed(futures):
                yield future.result()

        # The caller's block runs during `yield`, so its exceptions arrive here.
        try:
            yield run
        except (concurrent.futures.CancelledError, distributed.comm.CommClosedError) as error:
            problem = f"the Dask scheduler at {address} no longer answers"
            raise ValueError(f"{problem}; repeat the command with another") from error
        except distributed.KilledWorker as error:
            raise ValueError(f"the Dask cluster of {address}: {error}") from error
