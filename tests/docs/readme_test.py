"""The README's example is the file that it names, and prints what stands below it."""

import re

from tests.docs import scripts

_EXAMPLE = scripts.ROOT / "examples/annotated_einsum.py"


def test_the_example_runs_and_prints_what_the_readme_shows(tmp_path):
    readme = (scripts.ROOT / "README.md").read_text()
    code, shown = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", readme, re.DOTALL).groups()
    source = _EXAMPLE.read_text()
    assert source.partition('"""\n\n')[2] == code

    printed = scripts.output(source, tmp_path)
    for part in shown.split("...\n"):
        assert part in printed
