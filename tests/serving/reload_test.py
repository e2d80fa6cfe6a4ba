"""A real server loads another bundle while it translates."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest

from lingvo_gshard.decoding import bundle
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.input.tokenizer import vocabulary_files
from tests.decoding.conftest import made  # noqa: F401  (a fixture)

_LINES = ["ba ke li mo", "x", "mo li ke ba " * 9]


@contextlib.contextmanager
def _server(folder, log):
    """Yields a server's process and address; the log gets its standard error."""
    command = [sys.executable, "-m", "lingvo_gshard.serve", f"--bundle={folder}", "--port=0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process, process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, 128 + signal.SIGTERM)
    finally:
        process.kill()


def _post(url):
    request = urllib.request.Request(
        f"{url}/translate",
        json.dumps({"lines": _LINES}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return tuple(best["text"] for best, *_ in json.load(answer)["translations"])


class _Client(threading.Thread):
    """Sends requests until it is stopped; after an error it has fewer answers than requests."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.is_stopped, self.num_sent, self.answers = url, False, 0, []

    def run(self):
        while not self.is_stopped:
            self.num_sent += 1
            self.answers.append(_post(self.url))


def _point(link, folder):
    partial = link.with_suffix(".partial")
    partial.symlink_to(folder)
    os.replace(partial, link)


def _refusal(log):
    """Returns the log's line about the bundle that was not loaded."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if "loading failed, the old model is kept" in line:
                return line
        time.sleep(0.1)
    raise AssertionError("The server's log has no failed loading.")


@pytest.mark.slow
def test_a_bundle_is_exchanged_without_a_lost_request(made, tmp_path):  # noqa: F811
    first, translator = made
    names = ("second", "third", "link", "log")
    second, third, link, log = (tmp_path / name for name in names)
    decoder, source, target = bundle.load(first)
    arrays = dict(decoder.theta.FlattenItems())
    decoder.theta = decoder.theta.Pack(-np.asarray(array) for array in arrays.values())
    bundle.save(second, decoder, vocabulary_files(first, "parallel"))
    old, new = (
        tuple(best.text for best, *_ in each.decode(_LINES))
        for each in (translator, Translator(decoder, source, target))
    )
    assert old != new
    _point(link, first)
    with _server(link, log) as (process, url):
        assert process.stdout.readline() == "Loaded toy.MoE8E4L\n" and _post(url) == old
        clients = [_Client(url) for _ in range(4)]
        for client in clients:
            client.start()
        _point(link, second)
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "Loaded toy.MoE8E4L\n" and _post(url) == new
        shutil.copytree(second, third)
        weights = third / "weights.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        _point(link, third)
        process.send_signal(signal.SIGHUP)
        assert "link/weights.safetensors has SHA-256" in _refusal(log)
        assert _post(url) == new
        for client in clients:
            client.is_stopped = True
            client.join(300)
            assert client.num_sent == len(client.answers) and client.answers[-1] == new
            assert set(client.answers) <= {old, new}
