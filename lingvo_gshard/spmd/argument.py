"""One argument of a compiled program: checks a tree of arrays and puts it on the devices."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec

# CPU devices of one process share a thread pool in which every device of a program waits for the
# others at each collective. A second program in flight takes threads that the first one waits for,
# and both stop for ever: there, one runs at a time.
ONE_AT_A_TIME = threading.Lock()


class Argument:
    """What one argument must be, and where its arrays go."""

    def __init__(self, name: str, spec: NestedMap, shardings: NestedMap, donated: bool) -> None:
        """Args:
        name: for messages.
        spec: NestedMap of TensorSpec.
        shardings: NestedMap of NamedSharding, of the same structure.
        donated: whether the program writes over its memory.
        """
        self.spec, self.shardings = spec, shardings
        self._name, self._donated = name, donated
        self._paths = [path for path, _ in spec.FlattenItems()]
        self._specs, self._placements = spec.Flatten(), shardings.Flatten()

    def place(self, tree: NestedMap) -> list[jax.Array]:
        """The leaves of `tree` on their devices; an array that is there already stays.

        Raises:
          ValueError: missing or unexpected paths, a wrong shape or dtype.
        """
        items = tree.FlattenItems()
        if [path for path, _ in items] != self._paths:
            raise ValueError(self._wrong_paths({path for path, _ in items}))
        for (path, leaf), spec in zip(items, self._specs, strict=True):
            if getattr(leaf, "shape", None) != spec.shape or leaf.dtype != spec.dtype:
                raise ValueError(self._wrong_leaf(path, leaf, spec))
        return [
            leaf if _lies(leaf, to) else _put(leaf, to, self._donated)
            for (_, leaf), to in zip(items, self._placements, strict=True)
        ]

    def _wrong_paths(self, given: set[str]) -> str:
        missing = sorted(set(self._paths) - given)[:3]
        extra = sorted(given - set(self._paths))[:3]
        return f"{self._name}: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}."

    def _wrong_leaf(self, path: str, leaf: Any, spec: TensorSpec) -> str:
        given = f"a {type(leaf).__name__}"
        if hasattr(leaf, "shape"):
            given = f"{leaf.dtype}{list(leaf.shape)}"
        return f"{self._name}.{path}: {given} given, {spec.dtype}{list(spec.shape)} expected."


def _lies(leaf: Any, sharding: jax.sharding.NamedSharding) -> bool:
    return isinstance(leaf, jax.Array) and (
        leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    )


def _put(leaf: Any, sharding: jax.sharding.NamedSharding, donated: bool) -> jax.Array:
    # A donated array's memory is written over: it must not be the caller's own.
    may_alias = False if donated else None
    if not sharding.is_fully_addressable and not isinstance(leaf, jax.Array):
        # device_put would first ask all processes whether they have the same array.
        own = np.array(leaf) if donated else leaf
        return jax.make_array_from_callback(leaf.shape, sharding, lambda place: own[place])
    if not isinstance(leaf, jax.Array) or leaf.sharding.num_devices == 1:
        return jax.device_put(leaf, sharding, may_alias=may_alias)
    with ONE_AT_A_TIME:  # From one sharding to another is a program with collectives, too.
        return jax.block_until_ready(jax.device_put(leaf, sharding, may_alias=may_alias))
