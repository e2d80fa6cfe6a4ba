"""Progress is shown after a while: as a bar on a terminal, and as lines elsewhere."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
import types

import pytest

from xla_spmd.runtime import progress


@pytest.fixture(autouse=True)
def _shown(monkeypatch):
    monkeypatch.setenv("LINGVO_GSHARD_PROGRESS", "on")
    monkeypatch.setattr(progress, "_is_hidden", False)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECS", 0.0)
    monkeypatch.setattr(progress, "_LINE_SECS", 0.01)


def _after_some_lines(capsys, work):
    """Calls `work` when a line was shown; returns all lines."""
    shown = ""
    while not shown:
        time.sleep(0.01)
        shown = capsys.readouterr().err
    work()
    return shown


def test_quick_work_is_not_shown(capsys):
    with progress.shown("working", total=2, unit="steps") as done:
        done.update(2)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("at_once")
def test_lines_have_the_count_and_the_remaining_time(capsys):
    with progress.shown("working", total=8, unit="steps", first=2) as done:
        first = _after_some_lines(capsys, lambda: done.update(2, loss="2.5"))
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"working: 2/8 steps, 00:00 so far, (\?|\d\d:\d\d) left\n", first)
    assert re.fullmatch(r"working: 4/8 steps, 00:00 so far, .* left, loss=2.5", last)


@pytest.mark.usefixtures("at_once")
def test_without_a_total_or_a_count_there_is_no_time_left(capsys):
    with progress.shown("decoding", unit="lines") as done:
        _after_some_lines(capsys, lambda: done.update(30))
    assert capsys.readouterr().err.splitlines()[-1] == "decoding: 30 lines, 00:00 so far"

    with progress.shown("compiling step"):
        shown = _after_some_lines(capsys, lambda: None)
    assert shown.splitlines()[0] == "compiling step: 00:00 so far"


@pytest.mark.usefixtures("at_once")
def test_waiting_work_leaves_the_lines_to_its_cause(capsys):
    with progress.shown("decoding", unit="lines"):
        _after_some_lines(capsys, lambda: None)
        with progress.shown("compiling step"):
            while "compiling" not in capsys.readouterr().err:
                time.sleep(0.01)
            time.sleep(0.1)
            assert "decoding" not in capsys.readouterr().err
        while "decoding" not in capsys.readouterr().err:
            time.sleep(0.01)


@pytest.mark.usefixtures("at_once")
def test_bytes_have_a_scale(capsys):
    with progress.shown("reading", total=5 * 10**9, unit=progress.BYTES) as done:
        _after_some_lines(capsys, lambda: done.update(12 * 10**8))
    assert "reading: 1.20G/5.00GB, 00:00 so far" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("at_once")
def test_it_can_be_hidden_and_off(monkeypatch, capsys):
    def shows():
        with progress.shown("working", unit="steps") as done:
            done.update()
            time.sleep(0.05)
        return capsys.readouterr().err != ""

    assert shows()
    monkeypatch.setenv("LINGVO_GSHARD_PROGRESS", "off")
    assert not shows()
    monkeypatch.setenv("LINGVO_GSHARD_PROGRESS", "on")
    progress.hide()
    assert not shows()


def test_the_time_left_ignores_what_precedes_the_first_update(monkeypatch):
    clock = iter([0.0, 100.0, 110.0])
    monkeypatch.setattr(progress.time, "time", lambda: next(clock))
    done = progress.Progress("training", 40, "steps", 0, stays=True)
    done.update(20)  # After 100 s, most of which were compilation.
    assert done.rate is None
    done.done += 10
    assert done.rate == 1.0


def test_the_time_of_the_first_units_gives_the_rate_at_once(monkeypatch):
    clock = iter([0.0, 100.0, 110.0])
    monkeypatch.setattr(progress.time, "time", lambda: next(clock))
    done = progress.Progress("training", 40, "steps", 0, stays=True)
    done.update(20, secs=10.0)  # After 100 s, of which 90 were compilation.
    assert done.rate == 1.0


def test_threads_count_together():
    done = progress.Progress("copying", None, "B", 0, stays=False)
    threads = [
        threading.Thread(target=lambda: [done.update() for _ in range(5000)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.done == 40_000


def test_an_error_ends_it():
    before = threading.active_count()
    with pytest.raises(ValueError, match="mine"), progress.shown("working"):
        raise ValueError("mine")
    assert threading.active_count() == before


def test_a_terminal_has_a_bar_and_a_clock():
    code = """
import time
from xla_spmd.runtime import progress
progress._QUIET_SECS = 0.0
with progress.shown("training", total=4, unit="steps", stays=True) as done:
    with progress.shown("compiling step"):
        time.sleep(1.2)
    done.update(4, loss="2.5")
"""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=side)
    os.close(side)
    shown = b""
    try:
        while data := os.read(main, 4096):
            shown += data
    except OSError:  # Linux ends a terminal like this.
        pass
    os.close(main)
    assert process.wait() == 0
    assert re.search("compiling step: 00:01", shown.decode())
    assert re.search(r"training: 100%\|█+\| 4/4 \[.*loss=2.5\]", shown.decode())


@pytest.mark.parametrize(("has_widgets", "kind"), [(True, "Widget"), (False, "Bar")])
def test_a_notebook_has_a_widget_if_it_can_show_one(monkeypatch, has_widgets, kind):
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    found = object() if has_widgets else None
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: found)
    bar = progress._bar_class(progress.Progress("training", 4, "steps", 0, stays=True))
    assert bar.__name__ == kind


def test_outside_of_notebooks_the_bar_is_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    bar = progress._bar_class(progress.Progress("training", 4, "steps", 0, stays=True))
    assert bar.__name__ == "Bar"
