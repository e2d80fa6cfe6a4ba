"""The process that traces: what it returns, what is kept, and what comes of its failures."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.spmd import program, tracer
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions, tracing


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(tmp_path))
    return tmp_path / "programs"


def _files(cache: pathlib.Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*"))


def test_a_program_of_the_child_computes_what_one_of_this_process_does():
    there = tracer.traced(tracing.sgd, 4)
    here = tracing.sgd(4)
    assert there.results == here.results and there.partitioning == here.partitioning
    results = []
    for made in (there, here):
        args = [functions.randoms(arg, seed) for seed, arg in enumerate(made.args)]
        results.append(compile_program(made)(*args))
    for (path, a), (_, b) in zip(*(result.FlattenItems() for result in results), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


def test_nothing_is_kept_where_the_cache_is_off():
    assert tracer.traced(tracing.pid, "a").name == tracer.traced(tracing.pid, "a").name
    assert tracer.traced(tracing.pid, "a").name != f"a_{os.getpid()}"


def test_a_program_is_kept_by_its_arguments(cache, monkeypatch):
    made = tracer.traced(tracing.pid, "a")
    assert len(_files(cache)) == 1 and _files(cache)[0].startswith("pid-")

    monkeypatch.setattr(tracer, "_child", None)  # From here on, only what is kept is returned.
    assert tracer.traced(tracing.pid, "a") == made
    with pytest.raises(AttributeError):
        tracer.traced(tracing.pid, "b")


def test_code_and_versions_of_another_kind_are_not_taken(cache, monkeypatch):
    tracer.traced(tracing.pid, "a")
    monkeypatch.setattr(tracer.versions, "installed", lambda packages: {"jax": "0.0.1"})
    tracer.traced(tracing.pid, "a")
    monkeypatch.setattr(tracer.digests, "of_library", lambda: "other code")
    tracer.traced(tracing.pid, "a")
    assert len(_files(cache)) == 3


def test_settings_name_a_program_too(cache):
    params = registry.get_params("toy.MoE8E4L")
    first = tracer._kept_file(tracing.sgd, (params,))
    assert first == tracer._kept_file(tracing.sgd, (registry.get_params("toy.MoE8E4L"),))
    params.train.seed += 1
    assert first != tracer._kept_file(tracing.sgd, (params,))


def test_so_does_the_code_of_a_class_outside_the_library(cache, tmp_path, monkeypatch):
    source = tmp_path / "my_layers.py"
    source.write_text("class Layer:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_layers

    params = registry.get_params("toy.MoE8E4L")
    params.Define("mine", my_layers.Layer, "A user's own class.")
    first = tracer._kept_file(tracing.sgd, (params,))
    source.write_text("class Layer:\n    width = 2\n")
    assert first != tracer._kept_file(tracing.sgd, (params,))


@pytest.mark.parametrize("content", [b"", b"lingvo_gshard program\n" + bytes(99), b"foreign"])
def test_a_damaged_or_foreign_file_is_made_again(cache, caplog, content):
    made = tracer.traced(tracing.sgd, 2)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    again = tracer.traced(tracing.sgd, 2)
    assert again.results == made.results and "It is made again." in caplog.text
    assert program.load(path) == again


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch, caplog):
    file = tmp_path / "a file, and no folder"
    file.touch()
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(file))
    assert tracer.traced(tracing.sgd, 1).name == "sgd"
    assert "The program sgd is not kept" in caplog.text


def test_a_users_mistake_keeps_its_words():
    with pytest.raises(ValueError, match=r"^A setting was refused\.$"):
        tracer.traced(tracing.refuses, "A setting")


def test_other_failures_show_the_traceback_of_the_child():
    with pytest.raises(tracer.TracingError, match=r"(?s)tracing\.py.*KeyError: .a program"):
        tracer.traced(tracing.fails)


def test_a_child_that_dies_is_named_with_its_last_word_and_replaced():
    with pytest.raises(ChildProcessError, match=r"^dies: the process .* has died: a last word$"):
        tracer.traced(tracing.dies, 3)
    assert tracer.traced(tracing.sgd, 1).name == "sgd"


def test_the_child_outlives_an_interrupt_and_ends_when_it_is_idle(monkeypatch):
    name = tracer.traced(tracing.pid, "a").name
    pid = int(name.removeprefix("a_"))
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    monkeypatch.setattr(tracer, "_IDLE_SECS", 0.01)
    assert tracer.traced(tracing.pid, "a").name == name
    tracer._child._idle.join()
    assert tracer._child._pool is None
    monkeypatch.setattr(tracer, "_IDLE_SECS", 60.0)
    assert tracer.traced(tracing.pid, "a").name != name


def test_a_child_without_tensorflow_says_so(tmp_path):
    """`python -c` has a main module that the child does not run again."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('libfoo.so.1 is missing')\n")
    code = """
        from lingvo_gshard.spmd import environment
        environment.prepare(num_devices=1)
        import lingvo_gshard.registry
        from lingvo_gshard.spmd import tracer
        try:
            tracer.traced(lingvo_gshard.registry.get_params, "toy.MoE8E4L")
        except ValueError as error:
            print(error)
    """
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": paths, "LINGVO_GSHARD_COMPILATION_CACHE": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "Tracing needs TensorFlow, which cannot be imported here (libfoo.so.1 is missing); "
    )
