"""How the outcomes of mutations are told apart, on a reader that has faults of each sort."""

import json

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
