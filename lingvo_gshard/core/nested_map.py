"""NestedMap: a dict with attribute access, whose leaves are listed in sorted order."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


class NestedMap(dict):
    """A tree of named leaves. NestedMaps and lists are inner nodes; everything else is a leaf."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(sorted(self)) or "nothing"
            raise AttributeError(f"No {name!r} in this NestedMap, which holds {known}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def FlattenItems(self) -> list[tuple[str, Any]]:
        """Returns [(dotted path, leaf)], sorted by key at each level; list items are `name[0]`."""
        return list(_items("", self))

    def Flatten(self) -> list[Any]:
        """Returns the leaves, in FlattenItems' order."""
        return [leaf for _, leaf in self.FlattenItems()]

    def Pack(self, leaves: Iterable[Any]) -> "NestedMap":
        """Returns this structure with other leaves, in Flatten's order.

        Raises ValueError if their number differs.
        """
        leaves = list(leaves)  # They may come from a generator.
        expected = len(self.Flatten())
        if len(leaves) != expected:
            raise ValueError(f"Pack: {len(leaves)} leaves given, {expected} expected.")
        return _rebuild(self, iter(leaves))

    def Transform(self, fn: Callable[..., Any], *others: "NestedMap") -> "NestedMap":
        """Returns a tree of the same structure, whose leaves are fn(leaf, *leaves of `others`).

        Raises ValueError if `others` have a different number of leaves.
        """
        flat_others = [tree.Flatten() for tree in others]
        corresponding = zip(self.Flatten(), *flat_others, strict=True)
        return self.Pack(fn(*leaves) for leaves in corresponding)


def nested(what: str, tree: Any) -> NestedMap:
    """Returns a tree of dicts as a NestedMap, and the dicts within it as NestedMaps, too.

    A tuple with names counts as a dict, and another tuple as a list. Raises ValueError, which
    begins with `what`, if the tree is not a dict, or has a key that is not a str.
    """
    if not isinstance(tree, Mapping) and not hasattr(tree, "_asdict"):
        kind = type(tree).__name__
        raise ValueError(f"{what}: expected a dict by name, such as {{'x': x}}, got {kind}.")
    converted: NestedMap = _nested(what, tree)
    return converted


def _nested(what: str, node: Any) -> Any:
    if hasattr(node, "_asdict"):
        node = node._asdict()
    if isinstance(node, Mapping):
        for key in node:
            if not isinstance(key, str):
                raise ValueError(f"{what}: expected names as keys, got {key!r}.")
        return NestedMap({key: _nested(what, child) for key, child in node.items()})
    if isinstance(node, list | tuple):
        return [_nested(what, child) for child in node]
    return node


def _items(path: str, node: Any) -> Iterable[tuple[str, Any]]:
    """Yields the leaves below a node, each with its path from the root."""
    if isinstance(node, NestedMap):
        for key in sorted(node):
            yield from _items(f"{path}.{key}" if path else key, node[key])
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from _items(f"{path}[{i}]", item)
    else:
        yield path, node


def _rebuild(node: Any, leaves: Iterator[Any]) -> Any:
    """Returns a node with other leaves, which it takes in the order of `_items`."""
    if isinstance(node, NestedMap):
        return NestedMap({key: _rebuild(node[key], leaves) for key in sorted(node)})
    if isinstance(node, list):
        return [_rebuild(item, leaves) for item in node]
    return next(leaves)
