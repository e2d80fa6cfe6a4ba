"""Runs tasks in parallel processes, each once: a killed run's results are not computed again."""

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tqdm

from lingvo_gshard.core import atomic_file, child_process

_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs tasks with `num_workers` processes and keeps their results in `folder`.

    All runs that share a folder must give the same names and tasks.
    """

    folder: pathlib.Path
    num_workers: int

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers {self.num_workers}: expected at least 1")

    def run(self, name: str, calls: Sequence[Callable[[], _R]]) -> list[_R]:
        """Returns the results of calls without arguments, in order.

        A call is a partial application of a module's function, and writes the same files whenever
        it runs. An exception in it ends the run and is raised here.
        """
        paths = [self.folder / f"{name}-{i:06d}.result" for i in range(len(calls))]
        left = [(call, path) for call, path in zip(calls, paths, strict=True) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        num_done = len(paths) - len(left)
        for _ in tqdm.tqdm(self._done(left), name, len(paths), initial=num_done, disable=None):
            pass
        return [pickle.loads(path.read_bytes()) for path in paths]

    def _done(self, left: Sequence[tuple[Callable[[], Any], pathlib.Path]]) -> Iterator[None]:
        """Runs the calls and writes their results; yields whenever one is done."""
        if self.num_workers == 1 or len(left) < 2:
            for call, path in left:
                _run(call, path)
                yield
            return
        # A process that has loaded TensorFlow cannot be forked.
        with concurrent.futures.ProcessPoolExecutor(
            min(self.num_workers, len(left)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=child_process.end_with_parent,
        ) as pool:
            futures = [pool.submit(_run, call, path) for call, path in left]
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)


def _run(call: Callable[[], Any], path: pathlib.Path) -> None:
    atomic_file.write(path, pickle.dumps(call()))
