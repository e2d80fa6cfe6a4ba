"""The shares that several processes read, open and hold; and changes of their number."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import ports
from tests.train import many

pytestmark = pytest.mark.slow
_SHARED_BYTES = 4 * 512 * (many.NUM_EXPERTS + 1024)  # Arrays without experts.
_LAYER_BYTES = many.NUM_EXPERTS * many.EXPERT_BYTES
_SMALL = 2**18


def _start(folder, count, *actions):
    coordinator = f"127.0.0.1:{ports.free()}"
    keep = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    # Freed memory returns to the kernel at once.
    environment = {**keep, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-m", "tests.train.many", str(folder), coordinator, str(count)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, str(i), *actions], env=environment, **pipes)
        for i in range(count)
    ]
    try:
        done = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    counts = []
    for out, _ in done:
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        counts.append({action: found for line in lines for action, found in line.items()})
    return [process.returncode for process in started], counts, [err for _, err in done]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("many")


@pytest.fixture(scope="module")
def eight(folder):
    """Eight processes; the last one dies while all of them save."""
    actions = ["make", "save", "export", "begin_from_parts", "begin_from_run", "export", "check"]
    statuses, counts, errors = _start(folder, 8, *actions, "step", "die")
    assert statuses[-1] == -signal.SIGKILL and 0 not in statuses, errors
    assert all("check" in each for each in counts), errors
    return counts


@pytest.fixture(scope="module")
def two(folder, eight):
    """Two processes that continue, begin anew from the export of the eight, and lose one."""
    actions = ["restore", "check", "step", "check", "save", "make", "begin_from_parts"]
    statuses, counts, errors = _start(folder, 2, *actions, "step", "die")
    assert statuses[1] == -signal.SIGKILL and 0 not in statuses, errors
    assert all("begin_from_parts" in each for each in counts), errors
    return counts


@pytest.fixture(scope="module")
def four(folder, two):
    """Four processes that finish."""
    statuses, counts, errors = _start(folder, 4, "restore", "check", "step", "check", "save")
    assert statuses == [0] * 4, errors
    return counts


def _share(count):
    return many.NUM_LAYERS * _LAYER_BYTES // count


def test_saving_does_not_read_written_files(eight):
    assert all(each["save"]["read"] < _SMALL // 16 for each in eight)


def test_each_reads_what_its_devices_hold(eight, two, four):
    for counts, actions in ((eight, ["begin_from_run"]), (two, ["restore"]), (four, ["restore"])):
        for each in counts:
            for action in actions:
                own = _share(len(counts)) + _SHARED_BYTES
                assert own <= each[action]["read"] < own + _SMALL


def test_each_reads_and_writes_its_share_of_an_export(eight):
    read = [each["export"]["read"] for each in eight]
    assert all(_share(8) <= each <= _share(8) + _SHARED_BYTES + _SMALL for each in read)
    assert sum(read) < 8 * _share(8) + _SHARED_BYTES + 8 * _SMALL
    written = [name for each in eight for name in each["export"]["files"]]
    assert len(written) == len(set(written)) == 8 * many.NUM_LAYERS + 1  # The index, too.


def test_each_opens_the_parts_that_its_devices_need(folder, eight, two):
    weight_map = json.loads((folder / "w.safetensors.index.json").read_text())["weight_map"]
    for counts in (eight, two):
        for i, each in enumerate(counts):
            first, end = (many.NUM_EXPERTS * k // len(counts) for k in (i, i + 1))
            needed = {weight_map["theta.gate"], weight_map["theta.query"]}
            for begin in range(first, end, many.NUM_EXPERTS // 8):
                for layer in range(many.NUM_LAYERS):
                    experts = f"[{begin}:{begin + many.NUM_EXPERTS // 8}]"
                    needed.add(weight_map[f"theta.wi[{layer}]{experts}"])
            opened = each["begin_from_parts"]["files"]
            assert set(opened) == {*needed, "w.safetensors.index.json"}


def test_an_export_needs_the_memory_of_some_arrays_shards(eight):
    """The memory of a few arrays, not of all five: 40 MiB.

    An export needs the buffer for reading an array, the array, and, on a busy machine, memory that
    TensorStore still keeps from the array before. For a warm start, JAX copies the array, and keeps
    its argument for a while.
    """
    shard = _LAYER_BYTES // 8
    for each in eight:
        assert each["export"]["memory"] < 3 * shard + many.EXPERT_BYTES, each
        for action in ("begin_from_run", "begin_from_parts"):
            assert each[action]["memory"] < 4 * shard + 3 * many.EXPERT_BYTES, each
