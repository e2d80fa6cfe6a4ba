"""Writes the text of every registered experiment to tests/params/golden.

    python -m tests.params.write_goldens

A golden that changes is read in the diff: every number of every experiment stands there.
"""

from __future__ import annotations

import pathlib

from lingvo_gshard.spmd import environment

GOLDEN = pathlib.Path(__file__).parent / "golden"


def golden_path(name: str) -> pathlib.Path:
    """Where the text of the experiment registered as `name` is kept."""
    return GOLDEN / f"{name}.txt"


def main() -> None:
    """Rewrites all, and removes those of experiments that are no more."""
    environment.prepare()
    from lingvo_gshard import registry

    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for name in registry.registered_names():
        golden_path(name).write_text(registry.get_params(name).ToText())
        print(f"wrote {golden_path(name)}")


if __name__ == "__main__":
    main()
