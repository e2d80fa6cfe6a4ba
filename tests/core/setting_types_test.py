"""Settings are known to mypy: it finds a misspelled one in a user's layer."""

import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_LAYER = """
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.hyperparams import REQUIRED, AnyParams, InstantiableParams, setting


class Layer(BaseLayer):
    class Params(BaseLayer.Params):
        hidden_dim: int = setting(REQUIRED, "H.")
        rate: float = setting("fast", "")  # wrong default

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        print(self.p.hidden_dim + 1, p.rate)
        print(self.p.hiden_dim)  # misspelled
        print(p.hiden_dim)  # misspelled
        p.hiden_dim = 3  # misspelled


class Child(Layer):
    class Params(Layer.Params):
        hidden_dim = "8"  # wrong default

    p: Params


class Plain(Layer):
    def text(self) -> str:
        return self.p.hidden_dim  # wrong type

    def size(self) -> int:
        return self.p.hiden_dim  # misspelled


class Lingvo(BaseLayer):
    p: AnyParams

    @classmethod
    def Params(cls) -> InstantiableParams:  # type: ignore[override]
        p = super().Params()
        p.Define("hidden_dim", REQUIRED, "H.")
        return p

    def size(self) -> int:
        return self.p.hidden_dim


print(Layer.Params().Set(hidden_dim=3).hidden_dim)
print(Child.Params().Copy().Freeze().hiden_dim)  # misspelled
"""
_ERRORS = {
    "misspelled": r'"Params" has no attribute "hiden_dim"; maybe "hidden_dim"\?',
    "wrong default": r"Incompatible types in assignment",
    "wrong type": r'Incompatible return value type \(got "int", expected "str"\)',
}


@pytest.mark.slow
def test_mypy_finds_exactly_the_mistakes(tmp_path):
    path = tmp_path / "layer.py"
    path.write_text(_LAYER)

    command = [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path}", "--follow-imports=silent"]
    # Without the packages' types, which it reads for seconds, it knows all settings.
    done = subprocess.run(
        [*command, "--no-site-packages", path],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = dict(re.findall(r"layer\.py:(\d+): error: (.*)", done.stdout))

    expected = {}
    for number, line in enumerate(_LAYER.splitlines(), 1):
        _, comment, mistake = line.partition("  # ")
        if comment and mistake in _ERRORS:
            expected[str(number)] = _ERRORS[mistake]
    assert len(expected) == 8
    assert found.keys() == expected.keys(), done.stdout
    for number, pattern in expected.items():
        assert re.search(pattern, found[number]), (number, found[number])
