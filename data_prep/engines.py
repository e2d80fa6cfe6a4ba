"""What runs the tasks of a step: processes of this machine, or a cluster that Dask knows.

An engine is a function that runs calls without arguments, in any order and perhaps more than once,
and yields whenever one is done. What a call raises, it raises. Results are files (runs.py).
"""

import concurrent.futures
import contextlib
import functools
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence

from lingvo_gshard import cli
from lingvo_gshard.core import child_process

Call = Callable[[], None]
Engine = Callable[[Sequence[Call]], Iterator[None]]


def pool(num_workers: int) -> Engine:
    """Returns an engine of processes of this machine; one worker is this process itself."""
    if num_workers < 1:
        raise ValueError(f"num_workers {num_workers}: expected at least 1")
    return functools.partial(_run_in_pool, num_workers)


@contextlib.contextmanager
def dask(scheduler: str | None, num_workers: int) -> Iterator[Engine]:
    """Yields an engine on the workers of a scheduler's HOST:PORT; None starts local workers.

    Raises ValueError if Dask is not installed or the scheduler does not answer.
    """
    try:
        distributed = cli.load("distributed")
    except ModuleNotFoundError as error:
        raise ValueError("no Dask: pip install 'lingvo_gshard[dask]'") from error
    logging.getLogger("distributed").setLevel(logging.WARNING)
    workers = {"n_workers": num_workers, "threads_per_worker": 1, "dashboard_address": None}
    try:
        client = distributed.Client(scheduler, **({} if scheduler else workers))
    except (OSError, ValueError) as error:
        where = scheduler or "this machine"
        raise ValueError(f"no Dask scheduler answers at {where}: {error}") from error
    with client:
        yield functools.partial(_completed, client.get_executor(pure=False))


def _run_in_pool(num_workers: int, calls: Sequence[Call]) -> Iterator[None]:
    if num_workers == 1 or len(calls) < 2:
        for call in calls:
            yield call()
        return
    # A process that has loaded TensorFlow cannot be forked.
    with concurrent.futures.ProcessPoolExecutor(
        min(num_workers, len(calls)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=child_process.end_with_parent,
    ) as executor:
        yield from _completed(executor, calls)


def _completed(executor: concurrent.futures.Executor, calls: Sequence[Call]) -> Iterator[None]:
    futures = [executor.submit(call) for call in calls]
    try:
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    finally:  # If one fails, the others need not begin.
        for future in futures:
            future.cancel()
