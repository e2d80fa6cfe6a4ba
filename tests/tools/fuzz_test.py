"""The outcomes of mutations are distinguished, for readers with each kind of fault."""

import json
import os
import time

import numpy as np
import pytest

from tools import fuzz


def _content(path):
    return json.dumps({"version": 2, "of": path.name, "digest": "0"})


def _kind(folder, read):
    paths = [folder / name for name in ("a.json", "b.json")]
    for path in paths:
        path.write_text(_content(path))
    return fuzz.Kind("some", paths, lambda: read(paths))


def _unchecked(paths):
    return [path.read_bytes() for path in paths]


def _refused(message, error=ValueError):
    def read(paths):
        for path in paths:
            if path.read_text(errors="replace") != _content(path):
                raise error(message.format(path=path))
        return 1

    return read


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (_unchecked, "wrong"),
        (lambda paths: None, "same"),
        (_refused("{path} is damaged"), "refused"),
        (_refused("no such file", OSError), "unnamed"),
        (_refused("{path}\nis damaged"), "unnamed"),
        (_refused("{path} is damaged", KeyError), "traceback"),
    ],
)
def test_every_outcome_is_counted(tmp_path, capsys, read, outcome):
    kind = _kind(tmp_path, read)
    before = _unchecked(kind.files)
    counts = fuzz.outcomes(kind, 40, seed=3)
    assert counts.total() == 40 and counts[outcome] >= 35  # Some zeroed blocks may be empty.
    failed = counts.total() - counts["same"] - counts["refused"]
    assert capsys.readouterr().out.count("mutation") == min(failed, 3)
    assert _unchecked(kind.files) == before and len(list(tmp_path.iterdir())) == 2


def test_a_file_without_a_digest_may_give_another_answer(tmp_path):
    kind = _kind(tmp_path, _unchecked)
    unchecked = fuzz.Kind(kind.name, kind.files, kind.read, is_checked=False)
    counts = fuzz.outcomes(unchecked, 40, seed=3)
    assert counts["other"] >= 35 and counts["wrong"] == 0


def _fragile(folder):
    """A reader that dies, hangs or takes memory, depending on its file."""

    def read():
        match (folder / "what").read_text():
            case "crash":
                os.abort()
            case "hang":
                time.sleep(999)
            case "memory":
                np.ones(600 * 2**17)  # 600 MiB, above the bound.
        return 1

    return [fuzz.Kind("fragile", [folder / "what"], read)]


@pytest.mark.slow
def test_a_reader_that_dies_hangs_or_takes_memory_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "_HANG_SECS", 10.0)  # A busy machine is slow to give that memory.
    contents = ["crash", "hang", "memory", "fine"]
    (tmp_path / "what").write_text("fine")
    remaining = iter(contents)
    monkeypatch.setattr(fuzz, "_mutated", lambda *_: ("", next(remaining).encode()))
    child = fuzz.Child(_fragile, {"folder": tmp_path})
    (kind,) = _fragile(tmp_path)
    assert fuzz.outcomes(kind, 4, 1, child.read) == dict.fromkeys(
        ("crash", "hang", "memory", "same"), 1
    )
    child.stop()
