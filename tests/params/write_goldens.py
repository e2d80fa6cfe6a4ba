"""Writes the golden of every registered experiment to tests/params/golden/NAME.txt.

    python -m tests.params.write_goldens

A golden has lines `key : value`: the experiment's Params, the sizes of the letters of dims, and for
each weight its dims and the mesh axes that split them, on the partitions in the docstring. The
golden of an experiment that derives from another registered one has only the lines that differ from
it; any other golden, the lines that differ from toy.MoE8E4L. Read the diff of a golden that
changes.
"""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
import sys

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.settings import differences
from lingvo_gshard.model import placement
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.spmd.annotations import axes_text

GOLDEN = pathlib.Path(__file__).parent / "golden"
_ROOT = "toy.MoE8E4L"


def docstring(name: str) -> str:
    """Returns the docstring of the class registered as `name`."""
    return inspect.getdoc(registry.get_class(name)) or ""


def module_docstring(name: str) -> str:
    """Returns the docstring of the module of the class registered as `name`."""
    return sys.modules[registry.get_class(name).__module__].__doc__ or ""


def num_partitions(name: str) -> int:
    """Returns the number of partitions in the experiment's docstring."""
    stated = re.search(r"on\s+(\d+)\s+partitions", docstring(name))
    assert stated, f"{name}: the docstring states no partitions"
    return int(stated[1])


def params_with_vocabularies(name: str) -> Params:
    """Returns the Params with the vocabulary sizes in the module's docstring."""
    p = registry.get_params(name)
    settings = p.task.cls.VOCABULARIES
    if any(p.task.Get(setting) is None for setting in settings):
        stated = re.search(r"vocabularies of\s+(\d+)\s+and\s+(\d+)", module_docstring(name))
        assert stated, f"{name}: the module states no vocabularies"
        # A task with one vocabulary uses the first size.
        for setting, size in zip(settings, stated.groups(), strict=False):
            p.task.Set(**{setting: int(size)})
    return p


def golden(name: str) -> str:
    """Returns the expected content of the experiment's golden."""
    base = _base(name)
    if base is None:
        return _full_text(name)
    differing = differences(_full_text(name), _full_text(base))
    return "".join(f"{line}\n" for line in [f"differs from {base} in", *differing])


def main() -> None:
    """Rewrites all goldens, and removes goldens of experiments that no longer exist."""
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for name in registry.registered_names():
        (GOLDEN / f"{name}.txt").write_text(golden(name))


def _base(name: str) -> str | None:
    """Returns the experiment from which `name` derives, or else toy.MoE8E4L; None for that one."""
    if name == _ROOT:
        return None
    names = {
        registry.get_class(registered): registered for registered in registry.registered_names()
    }
    ancestors = registry.get_class(name).__mro__[1:]
    return next((names[cls] for cls in ancestors if cls in names), _ROOT)


@functools.cache
def _full_text(name: str) -> str:
    p = params_with_vocabularies(name)
    partitioning = placement.partitioning(p, num_partitions(name))
    sizes: dict[str, set[int]] = {}
    weights: dict[str, dict[str, list[str]]] = {}  # Path -> spec -> indices of layers.
    for path, weight in p.task.Instantiate(Annotator(partitioning)).weight_specs.FlattenItems():
        for letter, size in zip(weight.dims, weight.shape, strict=True):
            sizes.setdefault(letter, set()).add(size)

        # The sizes of dims without a letter, and the mesh axes.
        fixed = [str(n) for n, dim in zip(weight.shape, weight.dims, strict=True) if dim == "_"]
        axes = axes_text(partitioning.in_stack(weight.stack).axes(weight.dims))

        # One line for the weights of this name in all layers.
        index = ",".join(re.findall(r"\[(\d+)\]", path))
        all_layers = re.sub(r"\[\d+\]", "[]", path)
        layers_by_spec = weights.setdefault(f"weight.{all_layers}", {})
        spec = " ".join([weight.dims, *fixed, axes])
        layers_by_spec.setdefault(spec, []).append(index)

    mesh = partitioning.mesh
    lines = {
        "mesh": str(dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))),
        **{f"size.{letter}": str(sorted(values)) for letter, values in sizes.items()},
        **{path: _specs(layers_by_spec) for path, layers_by_spec in weights.items()},
    }
    text = registry.get_params(name).ToText()
    return text + "".join(f"{key} : {value}\n" for key, value in sorted(lines.items()))


def _specs(layers_by_spec: dict[str, list[str]]) -> str:
    """Returns a weight's spec if all its layers have the same, or each spec with its layers."""
    if len(layers_by_spec) == 1:
        return next(iter(layers_by_spec))
    parts = (f"{spec} in layers {' '.join(layers)}" for spec, layers in layers_by_spec.items())
    return "; ".join(parts)


if __name__ == "__main__":
    main()
