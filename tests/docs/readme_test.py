"""The README shows the code of the files that it names, and the output that they print."""

import re

import pytest

from tests.docs import scripts
from xla_plan.machines import topology

_README = (scripts.ROOT / "README.md").read_text()
_ONE_FILE = scripts.ROOT / "examples/gshard_in_one_file.py"


def _example(name):
    """Returns a file's code, and the parts of its output that the README shows."""
    shown = _README.partition(f"(examples/{name})")[2]
    code, printed = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", shown, re.DOTALL).groups()
    source = (scripts.ROOT / "examples" / name).read_text()
    assert source.partition('"""\n\n')[2] == code
    return source, printed.split("...\n")


def test_the_experts_are_an_excerpt_of_the_paper_in_one_file():
    shown = _README.partition("(examples/gshard_in_one_file.py)")[2]
    code = re.search(r"```python\n(.*?)```", shown, re.DOTALL)[1]
    assert code.count("\n") == 4
    assert f"\n{code}\n" in _ONE_FILE.read_text()


@pytest.mark.slow
def test_the_einsum_runs_and_prints_what_the_readme_shows(tmp_path):
    source, parts = _example("annotated_einsum.py")
    printed = scripts.output(source, tmp_path)
    for part in parts:
        assert part in printed


@pytest.mark.slow
def test_the_plan_prints_what_the_readme_shows(tmp_path):
    source, parts = _example("plan_jax_function.py")
    if not topology.is_installed("v5e"):
        pytest.skip("there is no compiler for v5e")
    printed = scripts.output(source, tmp_path, "plan_jax_function.py")
    for part in parts:
        assert part in printed
