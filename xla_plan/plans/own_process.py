"""Calls in separate processes: a compiler may die, and its memory is measured separately."""

import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Protocol, TypeVar

from xla_spmd.files import child_process
from xla_spmd.runtime import environment, main_module


class Work(Protocol):
    """A request to a process."""

    @property
    def label(self) -> str:
        """Its name, for messages."""
        ...


_Work = TypeVar("_Work", bound=Work)
_Result = TypeVar("_Result")


def call(function: Callable[[_Work], _Result], request: _Work) -> _Result:
    """Returns `function(request)`, called in a separate process.

    Raises the function's own errors, and ValueError if the process died.
    """
    # JAX and TensorFlow have threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # Otherwise it would keep the stderr filter open.
    pool = ProcessPoolExecutor(1, context, child_process.end_with_parent)

    # The process does not run the main script again, unless that defines the function or request.
    _, needs_main = main_module.pickled((function, request))
    main = contextlib.nullcontext() if needs_main else main_module.hidden()
    with environment.quiet_stderr(), pool:
        try:
            with main:
                submitted = pool.submit(function, request)
            return submitted.result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"{request.label}: the process that compiled it died; this machine's memory may be "
                "too small, or the program damaged."
            ) from error
