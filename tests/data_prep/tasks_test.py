import functools
import os
import pathlib

import pytest

from data_prep import tasks


def _note(path: pathlib.Path) -> tuple[str, int]:
    """Appends a line to a file: how often it ran shows."""
    with path.open("a") as file:
        file.write("ran\n")
    return path.name, os.getpid()


def _fail(path: pathlib.Path) -> None:
    raise ValueError(f"no {path.name}")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_are_in_order_and_each_task_is_done_once(tmp_path, num_workers):
    paths = [tmp_path / f"task{i}" for i in range(5)]
    runner = tasks.Runner(tmp_path / "results", num_workers)
    runner.run("one", [functools.partial(_note, path) for path in paths[:2]])
    results = runner.run("one", [functools.partial(_note, path) for path in paths])
    assert [name for name, _ in results] == [path.name for path in paths]
    assert all(path.read_text() == "ran\n" for path in paths)
    assert all(pid != os.getpid() for _, pid in results) == (num_workers == 2)
    # Another name is another step.
    runner.run("two", [functools.partial(_note, paths[0])])
    assert paths[0].read_text() == "ran\n" * 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_a_task_raises_reaches_the_caller(tmp_path, num_workers):
    runner = tasks.Runner(tmp_path / "results", num_workers)
    with pytest.raises(ValueError, match=r"no task\d"):
        runner.run("one", [functools.partial(_fail, tmp_path / f"task{i}") for i in range(2)])


def test_no_workers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"num_workers 0: expected at least 1"):
        tasks.Runner(tmp_path, 0)
