"""Runs tasks in parallel processes, each once: a killed run's results are not computed again."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tqdm

from lingvo_gshard.core import atomic_file

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs tasks with `num_workers` processes and keeps their results in `folder`.

    All runs that share a folder must give the same names, functions and arguments.
    """

    folder: pathlib.Path
    num_workers: int

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers {self.num_workers}: expected at least 1")

    def map(self, name: str, function: Callable[[_T], _R], arguments: Sequence[_T]) -> list[_R]:
        """Returns function(argument) for each argument, in order.

        The function must be one of a module, and write the same files whenever it runs. An
        exception in it ends the map and is raised here.
        """
        paths = [self.folder / f"{name}-{i:06d}.result" for i in range(len(arguments))]
        missing = [i for i, path in enumerate(paths) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        calls = [(function, arguments[i], paths[i]) for i in missing]
        with tqdm.tqdm(
            total=len(paths), initial=len(paths) - len(missing), desc=name, disable=None
        ) as progress:
            if self.num_workers == 1 or len(calls) < 2:
                for call in calls:
                    _run(call)
                    progress.update()
            else:
                self._run_in_processes(calls, progress)
        return [pickle.loads(path.read_bytes()) for path in paths]

    def _run_in_processes(self, calls: Sequence[Any], progress: tqdm.tqdm) -> None:
        # A process that has loaded TensorFlow cannot be forked.
        with concurrent.futures.ProcessPoolExecutor(
            min(self.num_workers, len(calls)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_end_with_parent,
        ) as pool:
            futures = [pool.submit(_run, call) for call in calls]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
                    progress.update()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _run(call: tuple[Callable[[Any], Any], Any, pathlib.Path]) -> None:
    function, argument, path = call
    atomic_file.write(path, pickle.dumps(function(argument)))


def _end_with_parent() -> None:
    """Ends this process when its parent is killed; otherwise it would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
