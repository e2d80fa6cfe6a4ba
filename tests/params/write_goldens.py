"""Writes what every registered experiment is to tests/params/golden.

    python -m tests.params.write_goldens

NAME.params.txt is the text of its Params; NAME.weights.txt has a line a weight: path, shape, dims,
the mesh axes that split it, and one partition's part, on the partitions of its launch command. A
golden that changes is read in the diff: every number of every experiment stands there.
"""

from __future__ import annotations

import inspect
import pathlib
import re
import sys

from lingvo_gshard.spmd import environment

GOLDEN = pathlib.Path(__file__).parent / "golden"


def docstring(name: str) -> str:
    """Of the class registered as `name`."""
    from lingvo_gshard import registry

    return inspect.getdoc(registry.get_class(name)) or ""


def num_partitions(name: str) -> int:
    """Of the launch command in the experiment's docstring."""
    stated = re.search(r"--num_partitions=(\d+)", docstring(name))
    assert stated, f"{name}: the docstring states no --num_partitions"
    return int(stated[1])


def params_with_vocabularies(name: str):
    """The experiment's Params with the vocabularies that its module's docstring states."""
    from lingvo_gshard import registry

    p = registry.get_params(name)
    if p.task.source_vocab_size is None:
        module_doc = sys.modules[registry.get_class(name).__module__].__doc__ or ""
        stated = re.search(r"vocabularies of\s+(\d+)\s+and\s+(\d+)", module_doc)
        assert stated, f"{name}: the module states no vocabularies"
        source, target = map(int, stated.groups())
        p.task.Set(source_vocab_size=source, target_vocab_size=target)
    return p


def goldens(name: str) -> dict[pathlib.Path, str]:
    """The experiment's files and what they shall hold."""
    from lingvo_gshard import registry
    from lingvo_gshard.sharding.layout import TensorSpec
    from lingvo_gshard.spmd.describe import axes_text
    from lingvo_gshard.train import run

    p = params_with_vocabularies(name)
    partitioning = run.partitioning_over(p, num_partitions(name))
    lines = []
    for path, weight in p.task.Instantiate(partitioning).weight_specs.FlattenItems():
        part = partitioning.shard_shape(TensorSpec(weight.shape, "float32", weight.dims))
        axes = axes_text(partitioning.axes(weight.dims))
        lines.append(f"{path} {list(weight.shape)} {weight.dims} {axes} {list(part)}\n")
    return {
        GOLDEN / f"{name}.params.txt": registry.get_params(name).ToText(),
        GOLDEN / f"{name}.weights.txt": "".join(lines),
    }


def main() -> None:
    """Rewrites all, and removes those of experiments that are no more."""
    environment.prepare()
    from lingvo_gshard import registry

    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for name in registry.registered_names():
        for path, text in goldens(name).items():
            path.write_text(text)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
