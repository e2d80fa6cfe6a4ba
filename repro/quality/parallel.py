"""Runs calls at the same time, and stops at the first failure."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_Result = TypeVar("_Result")


def results(calls: Iterable[Callable[[], _Result]], jobs: int) -> list[_Result]:
    """Runs `jobs` calls at a time and returns their results; after an error, starts no more."""
    failed = threading.Event()

    def run(call: Callable[[], _Result]) -> _Result:
        if failed.is_set():
            raise concurrent.futures.CancelledError
        try:
            return call()
        except BaseException:
            failed.set()
            raise

    with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
        return list(threads.map(run, calls))
