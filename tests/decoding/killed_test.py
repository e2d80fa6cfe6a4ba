"""Two processes translate a file like one process, even if they are killed repeatedly."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from lingvo_gshard.spmd.processes import EXIT_STATUS
from tests import ports, quick_machine_code

pytestmark = pytest.mark.slow

_ROOT = pathlib.Path(__file__).parents[2]
_WORDS = ("ba", "ke", "li", "mo", "a", "line", "of", "words,", "in parts")
_CHUNKS = 16


@pytest.fixture
def text(tmp_path):
    """A file with lines of different lengths, some of them blank."""
    rng = random.Random(3)
    lines = [" ".join(rng.choices(_WORDS, k=rng.randrange(6))) for _ in range(_CHUNKS * 16 - 5)]
    path = tmp_path / "in.txt"
    path.write_text("\n".join([*lines, "ba"]))
    return path


@pytest.fixture(autouse=True)
def environment(tmp_path_factory, monkeypatch):
    """Caches the programs, which each start would compile otherwise."""
    for name in [*os.environ]:
        if name.startswith(("JAX_", "XLA_FLAGS", "PJRT_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", quick_machine_code.FLAGS)
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(cache))
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))


def _start(folder, text, output, count):
    command = [sys.executable, "-m", "lingvo_gshard.translate", f"--bundle={folder}"]
    command += ["--platform=cpu", "--nbest=2", "--scores", f"--input={text}", f"--output={output}"]
    if count > 1:
        command += [f"--num_processes={count}", f"--coordinator=127.0.0.1:{ports.free()}"]
    return [
        subprocess.Popen([*command, f"--process_id={i}"], stderr=subprocess.PIPE, text=True)
        for i in range(count)
    ]


def _finish(started):
    try:
        errors = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), errors


def _kill_one(started, rng, parts, num_parts):
    """Kills a process soon after `num_parts` parts exist; the other process then ends."""
    while len(list(parts.glob("part_*.txt"))) < num_parts:
        assert all(process.poll() is None for process in started), "ended before it was killed"
        time.sleep(0.002)
    time.sleep(rng.random() * 0.05)
    killed = rng.choice(started)
    killed.send_signal(signal.SIGKILL)
    statuses = {process.wait(timeout=60) for process in started}
    assert statuses <= {-signal.SIGKILL, EXIT_STATUS, 1} and killed.returncode == -signal.SIGKILL


def test_killed_repeatedly_it_writes_the_same_file(made, text, tmp_path):
    outputs = {name: tmp_path / name for name in ("one", "two", "killed")}
    _finish(_start(made[0], text, outputs["one"], 1))
    _finish(_start(made[0], text, outputs["two"], 2))
    rng, parts = random.Random(11), tmp_path / "killed.parts"
    for num_parts in (1, 6, 11):
        _kill_one(_start(made[0], text, outputs["killed"], 2), rng, parts, num_parts)
        assert not outputs["killed"].exists()
    _finish(_start(made[0], text, outputs["killed"], 2))
    written = {name: path.read_bytes() for name, path in outputs.items()}
    assert written["killed"] == written["two"] == written["one"]
    assert written["one"].count(b"\n") == text.read_text().count("\n") + 1
    assert len(set(written["one"].split(b"\n"))) > 50
    assert not parts.exists()
