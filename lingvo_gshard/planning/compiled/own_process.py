"""Calls in processes of their own, as a compiler may die and its memory is measured alone."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, TypeVar

from lingvo_gshard.files import child_process
from lingvo_gshard.spmd import environment


class Work(Protocol):
    """What a process is asked to do."""

    @property
    def label(self) -> str:
        """Its name, for messages."""
        ...


_Work = TypeVar("_Work", bound=Work)
_Result = TypeVar("_Result")


def call(function: Callable[[_Work], _Result], request: _Work) -> _Result:
    """Returns `function(request)`, called in a process of its own.

    Raises what the function raises, and ValueError if the process died.
    """
    # JAX and TensorFlow have threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, child_process.end_with_parent)
    with environment.quiet_stderr(), pool:
        try:
            return pool.submit(function, request).result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"{request.label}: the process that compiled it died; this machine's memory may be "
                "too small, or the program damaged."
            ) from error
