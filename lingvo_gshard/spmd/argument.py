"""One argument of a compiled program: checks a tree of arrays and puts it on the devices."""

import threading
from typing import Any

import jax
import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec

# The CPU devices of one process share a thread pool, and at each collective every device of a
# program waits in it for the others. Two programs at once can take each other's threads and
# deadlock, so one runs at a time.
ONE_AT_A_TIME = threading.Lock()


class Argument:
    """What one argument must be, and where its arrays go."""

    def __init__(self, name: str, spec: NestedMap, shardings: NestedMap, donated: bool) -> None:
        """Makes an argument.

        Args:
          name: the name in messages.
          spec: NestedMap of TensorSpec.
          shardings: NestedMap of NamedSharding, of the same structure.
          donated: whether the program overwrites the argument's memory.
        """
        self.spec, self.shardings = spec, shardings
        self._name, self._donated = name, donated
        self._paths = [path for path, _ in spec.FlattenItems()]
        self._leaves = list(zip(self._paths, spec.Flatten(), shardings.Flatten(), strict=True))

    def place(self, tree: NestedMap) -> list[jax.Array]:
        """The leaves of `tree` on their devices; an array that lies there already is kept.

        Raises:
          ValueError: missing or unexpected paths, or a wrong shape or dtype.
        """
        items = tree.FlattenItems()
        if [path for path, _ in items] != self._paths:
            raise ValueError(self._wrong_paths({path for path, _ in items}))
        for (_, leaf), (path, spec, sharding) in zip(items, self._leaves, strict=True):
            shape = getattr(leaf, "shape", None)
            is_whole = shape == spec.shape
            if not (is_whole or shape == own_shape(spec, sharding)) or leaf.dtype != spec.dtype:
                raise ValueError(self._wrong_leaf(path, leaf, spec, sharding))
        return [
            _put(leaf, spec, sharding, self._donated)
            for (_, leaf), (_, spec, sharding) in zip(items, self._leaves, strict=True)
        ]

    def _wrong_paths(self, given: set[str]) -> str:
        missing = sorted(set(self._paths) - given)[:3]
        extra = sorted(given - set(self._paths))[:3]
        return f"{self._name}: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}."

    def _wrong_leaf(
        self, path: str, leaf: Any, spec: TensorSpec, sharding: jax.sharding.Sharding
    ) -> str:
        given = f"a {type(leaf).__name__}"
        if hasattr(leaf, "shape"):
            given = f"{leaf.dtype}{list(leaf.shape)}"
        expected, own = f"{spec.dtype}{list(spec.shape)}", own_shape(spec, sharding)
        if own != spec.shape:
            expected += f", or {list(own)}, this process's share,"
        return f"{self._name}.{path}: {given} given, {expected} expected."


def own_shape(spec: TensorSpec, sharding: jax.sharding.Sharding) -> tuple[int, ...]:
    """The shape of the part of an array that the devices of this process hold together."""
    if sharding.is_fully_addressable:
        return spec.shape
    indices = sharding.addressable_devices_indices_map(spec.shape).values()
    spans = zip(*(index for index in indices if index is not None), strict=True)
    return tuple(
        sum(len(range(*span)) for span in {one.indices(size) for one in along})
        for size, along in zip(spec.shape, spans, strict=True)
    )


def _put(
    leaf: Any, spec: TensorSpec, sharding: jax.sharding.NamedSharding, donated: bool
) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.shape == spec.shape:
        return _move(leaf, sharding, donated)
    if not sharding.is_fully_addressable:
        # device_put would first ask all processes whether they have the same array.
        own = np.array(leaf) if donated else np.asarray(leaf)
        if leaf.shape != spec.shape:
            return jax.make_array_from_process_local_data(sharding, own, spec.shape)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: own[index])
    return jax.device_put(leaf, sharding, may_alias=False if donated else None)


def _move(leaf: jax.Array, sharding: jax.sharding.NamedSharding, donated: bool) -> jax.Array:
    if leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    # The program overwrites a donated array's memory: it must not be the caller's own.
    may_alias = False if donated else None
    if leaf.sharding.num_devices == 1:
        return jax.device_put(leaf, sharding, may_alias=may_alias)
    with ONE_AT_A_TIME:  # Moving from one sharding to another is a program with collectives.
        return jax.block_until_ready(jax.device_put(leaf, sharding, may_alias=may_alias))
