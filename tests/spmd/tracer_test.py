"""The tracing process: its results, its cache, and the handling of its failures."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from lingvo_gshard import registry
from lingvo_gshard.spmd import program, tracer
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions, tracing
from tests.xla_spmd.files import child_process_test


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(tmp_path))
    return tmp_path / "programs"


def _files(cache: pathlib.Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*"))


@pytest.mark.slow
def test_a_program_traced_in_the_child_gives_equal_results():
    there = tracer.traced(tracing.sgd, 4)
    here = tracing.sgd(4)
    assert there.results == here.results and there.partitioning == here.partitioning
    results = []
    for made in (there, here):
        args = [functions.randoms(arg, seed) for seed, arg in enumerate(made.args)]
        results.append(compile_program(made)(*args))
    for (path, a), (_, b) in zip(*(result.FlattenItems() for result in results), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.slow
def test_nothing_is_kept_where_the_cache_is_off():
    assert tracer.traced(tracing.pid, "a").name == tracer.traced(tracing.pid, "a").name
    assert tracer.traced(tracing.pid, "a").name != f"a_{os.getpid()}"


def test_a_program_is_kept_by_its_arguments(cache, monkeypatch):
    made = tracer.traced(tracing.pid, "a")
    assert len(_files(cache)) == 1 and _files(cache)[0].startswith("pid-")

    monkeypatch.setattr(tracer, "_child", None)  # From here on, only cached programs are returned.
    assert tracer.traced(tracing.pid, "a") == made
    with pytest.raises(AttributeError):
        tracer.traced(tracing.pid, "b")


def test_programs_of_other_code_versions_and_flags_are_not_used(cache, monkeypatch):
    tracer.traced(tracing.pid, "a")
    monkeypatch.setattr(tracer.versions, "installed", lambda packages: {"jax": "0.0.1"})
    tracer.traced(tracing.pid, "a")
    monkeypatch.setattr(tracer.digests, "of_library", lambda: "other code")
    tracer.traced(tracing.pid, "a")
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    tracer.traced(tracing.pid, "a")
    assert len(_files(cache)) == 4


def test_settings_name_a_program_too(cache):
    params = registry.get_params("toy.MoE8E4L")
    first = tracer._kept_file(tracing.sgd, (params,))
    assert first == tracer._kept_file(tracing.sgd, (registry.get_params("toy.MoE8E4L"),))
    params.train.seed += 1
    assert first != tracer._kept_file(tracing.sgd, (params,))


@pytest.mark.parametrize("name", ["Layer", "function"])
def test_code_outside_the_library_names_a_program_too(cache, tmp_path, monkeypatch, name):
    base = tmp_path / "my_base.py"
    base.write_text("class Base:\n    pass\n")
    source = tmp_path / "my_layers.py"
    source.write_text("from my_base import Base\nclass Layer(Base): pass\ndef function(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("my_base", "my_layers"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    import my_layers

    params = registry.get_params("toy.MoE8E4L")
    params.Define("mine", getattr(my_layers, name), "A user's own code.")
    names = {tracer._kept_file(tracing.sgd, (params,))}
    source.write_text("Another text.")
    names.add(tracer._kept_file(tracing.sgd, (params,)))
    base.write_text("Another text.")
    names.add(tracer._kept_file(tracing.sgd, (params,)))
    assert len(names) == (3 if name == "Layer" else 2)


@pytest.mark.parametrize("content", [b"", b"lingvo_gshard program\n" + bytes(99), b"foreign"])
def test_a_damaged_or_foreign_file_is_made_again(cache, caplog, content):
    made = tracer.traced(tracing.sgd, 2)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    again = tracer.traced(tracing.sgd, 2)
    assert again.results == made.results and "It is made again." in caplog.text
    assert program.load(path, path.stem) == again


def test_a_kept_program_under_another_programs_name_is_not_used(cache, caplog):
    few = tracer.traced(tracing.sgd, 2)
    (path,) = cache.iterdir()
    tracer.traced(tracing.sgd, 4)
    (other,) = set(cache.iterdir()) - {path}
    path.write_bytes(other.read_bytes())
    assert tracer.traced(tracing.sgd, 2).partitioning == few.partitioning
    assert "It is made again." in caplog.text


def test_programs_are_made_if_the_cache_cannot_be_written(tmp_path, monkeypatch, caplog):
    file = tmp_path / "a file, and no folder"
    file.touch()
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(file))
    assert tracer.traced(tracing.sgd, 1).name == "sgd"
    assert "The program sgd is not kept" in caplog.text


def test_programs_are_made_if_a_kept_file_cannot_be_read(cache, caplog):
    tracer.traced(tracing.sgd, 1)
    (path,) = cache.iterdir()
    path.unlink()
    path.mkdir()
    assert tracer.traced(tracing.sgd, 1).name == "sgd"
    assert "The program sgd is not kept" in caplog.text


@pytest.mark.parametrize("value", [np.arange(2000), (1, np.arange(2000)), object()])
def test_settings_with_ambiguous_text_are_not_cached(cache, value):
    params = registry.get_params("toy.MoE8E4L")
    params.Define("mine", value, "A user's own setting.")
    assert tracer._kept_file(tracing.sgd, (params,)) is None


def test_a_users_mistake_keeps_its_words_and_has_the_childs_traceback():
    with pytest.raises(ValueError, match=r"^A setting was refused\.$") as error:
        tracer.traced(tracing.refuses, "A setting")
    assert "tracing.py" in str(error.value.__cause__)


def test_other_failures_show_the_traceback_of_the_child():
    with pytest.raises(tracer.TracingError, match=r"(?s)tracing\.py.*KeyError: .a program"):
        tracer.traced(tracing.fails)


@pytest.mark.slow
def test_a_child_that_dies_is_reported_with_its_last_line_and_replaced():
    expected = r"^dies: the process .* has died with status 3: a last word$"
    with pytest.raises(ChildProcessError, match=expected):
        tracer.traced(tracing.dies, 3)
    assert tracer.traced(tracing.sgd, 1).name == "sgd"


def test_the_child_s_output_is_shown_without_greetings(monkeypatch, capsys):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    tracer.traced(tracing.warns)
    warning = "W1127 02:03:50.167440    5858 a.cc:492] a warning\n"
    assert capsys.readouterr().err == warning
    tracer.end()
    assert capsys.readouterr().err == "progress 5%\r10%\n"


@pytest.mark.slow
def test_a_child_that_the_kernel_killed_may_have_lacked_memory():
    with pytest.raises(ChildProcessError, match=r"has died by SIGKILL; is there enough memory\?$"):
        tracer.traced(tracing.is_killed)


@pytest.mark.slow
def test_the_child_survives_an_interrupt_and_ends_when_idle_or_on_request(monkeypatch):
    name = tracer.traced(tracing.pid, "a").name
    pid = int(name.removeprefix("a_"))
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    monkeypatch.setattr(tracer, "_IDLE_SECS", 0.01)
    assert tracer.traced(tracing.pid, "a").name == name
    tracer._child._idle.join()
    assert tracer._child._process is None
    monkeypatch.setattr(tracer, "_IDLE_SECS", 60.0)
    assert tracer.traced(tracing.pid, "a").name != name

    tracer.end()
    assert tracer._child._process is None


@pytest.mark.slow
def test_a_child_without_tensorflow_says_so(tmp_path):
    """`python -c` has a main module that the child does not run again."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('libfoo.so.1 is missing')\n")
    code = """
        from xla_spmd.runtime import environment
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


# A user's script, with the start of its work. A shell's background jobs ignore SIGINT, and their
# children would ignore it as well.
_SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from lingvo_gshard import cli
from lingvo_gshard.spmd import tracer
from tests.spmd import tracing

def main():
    tracer.traced(tracing.takes_long)

{start}
"""
_GUARDED = 'if __name__ == "__main__":\n    cli.run("script", main)'


def _start(folder: pathlib.Path, start: str) -> subprocess.Popen:
    """Starts the script in a separate process group, with a separate temporary folder."""
    script = folder / "script.py"
    script.write_text(_SCRIPT.format(start=start))
    (folder / "tmp").mkdir()
    env = {"PYTHONPATH": os.getcwd(), "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        [sys.executable, script],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_an_interrupt_ends_the_program_and_its_child_at_once(tmp_path):
    run = _start(tmp_path, _GUARDED)
    child = int(run.stdout.readline())
    interrupted = time.monotonic()
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (130, "script: interrupted\n")
    assert time.monotonic() - interrupted < 10
    assert not child_process_test.is_running(child)
    assert not any((tmp_path / "tmp").iterdir())


_UNGUARDED = """
from lingvo_gshard.spmd import tracer
from xla_spmd.runtime import environment
environment.prepare(1)
from tests.spmd import tracing
{own}
print(tracer.traced({function}, 1).name, flush=True)
"""
_OWN = """
def own(num_partitions):
    return tracing.sgd(num_partitions)
"""


def _unguarded(folder, own, function):
    script = folder / "script.py"
    script.write_text(_UNGUARDED.format(own=own, function=function))
    env = {"PYTHONPATH": os.getcwd(), "LINGVO_GSHARD_COMPILATION_CACHE": "off"}
    command = [sys.executable, script]
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_an_unguarded_script_does_its_work_once(tmp_path):
    done = _unguarded(tmp_path, _OWN, "tracing.sgd")
    assert (done.returncode, done.stdout) == (0, "sgd\n"), done.stderr


@pytest.mark.slow
def test_an_unguarded_script_may_not_define_traced_functions(tmp_path):
    done = _unguarded(tmp_path, _OWN, "own")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: own: this script defines classes or functions that other")
    assert last.endswith("or define them in a separate module.")


def test_functions_of_a_notebook_are_refused():
    code = """
        from lingvo_gshard.spmd import tracer
        from xla_spmd.runtime import environment
        environment.prepare(1)
        def own(): pass
        tracer.traced(own)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: own is defined in a notebook or at a prompt, where")
