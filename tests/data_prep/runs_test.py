import functools
import itertools
import os
import pathlib

import pytest

from data_prep import engines, runs


def _note(path: pathlib.Path) -> tuple[str, int]:
    """Appends a line to a file, so that the number of calls shows."""
    with path.open("a") as file:
        file.write("ran\n")
    return path.name, os.getpid()


def _fail(path: pathlib.Path) -> None:
    raise ValueError(f"no {path.name}")


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_results_are_in_order_and_each_task_is_done_once(tmp_path, num_workers):
    paths = [tmp_path / f"task{i}" for i in range(5)]
    calls = {path.name: functools.partial(_note, path) for path in paths}
    run = functools.partial(runs.run_tasks, tmp_path / "results", engines.pool(num_workers))
    run("one", dict(itertools.islice(calls.items(), 2)))
    results = run("one", calls)
    assert [(key, name) for key, (name, _) in results.items()] == [(key, key) for key in calls]
    assert all(path.read_text() == "ran\n" for path in paths)
    assert all(pid != os.getpid() for _, pid in results.values()) == (num_workers == 2)
    # Another name means another step.
    run("two", {0: calls["task0"]})
    assert paths[0].read_text() == "ran\n" * 2


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_of_a_task_reaches_the_caller(tmp_path, num_workers):
    calls = {i: functools.partial(_fail, tmp_path / f"task{i}") for i in range(2)}
    with pytest.raises(ValueError, match=r"no task\d"):
        runs.run_tasks(tmp_path / "results", engines.pool(num_workers), "one", calls)
