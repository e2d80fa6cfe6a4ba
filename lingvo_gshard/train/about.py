"""What a checkpoint says that it is of, beside its arrays."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import specs


@dataclasses.dataclass(frozen=True)
class About:
    """What a run saves.

    Attributes:
      params: the experiment's Params.ToText().
      partitioning: how the state lay on its devices.
      state_spec: NestedMap of TensorSpec.
    """

    params: str
    partitioning: Partitioning
    state_spec: NestedMap

    def described(self) -> dict[str, Any]:
        """All that as JSON's types, of state_spec each array's TensorSpec by path."""
        mesh = self.partitioning.mesh
        return {
            "params": self.params,
            "mesh": [list(mesh.axis_names), list(mesh.axis_sizes), list(mesh.devices)],
            "table": dict(self.partitioning.table),
            "arrays": {path: specs.to_json(spec) for path, spec in self.state_spec.FlattenItems()},
            "num_processes": jax.process_count(),
        }


def specs_of(about: dict[str, Any]) -> dict[str, TensorSpec]:
    """What `described` tells of the state, by path."""
    return {path: specs.from_json(text) for path, text in about["arrays"].items()}


def check_specs(path: pathlib.Path, held: dict[str, TensorSpec], state_spec: NestedMap) -> None:
    """ValueError, naming the array, unless the checkpoint holds those of the state."""
    wanted = dict(state_spec.FlattenItems())
    for name in sorted(held.keys() | wanted.keys()):
        here, there = (_text(arrays.get(name)) for arrays in (wanted, held))
        if here != there:
            raise ValueError(f"{path}: {name} is {there} in the checkpoint, {here} in the model.")


def _text(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"
