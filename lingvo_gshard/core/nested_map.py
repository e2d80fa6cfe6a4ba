"""NestedMap: a dict with attribute access, whose leaves are listed in sorted order."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class NestedMap(dict):
    """A tree of named leaves. Nested NestedMaps and lists are inner nodes; all else is a leaf."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(sorted(self)) or "nothing"
            raise AttributeError(f"No {name!r} in this NestedMap, which holds {known}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def FlattenItems(self) -> list[tuple[str, Any]]:
        """[(dotted path, leaf)], sorted by key at each level; list items are `name[0]`, ..."""
        return list(_items("", self))

    def Flatten(self) -> list[Any]:
        """The leaves, in FlattenItems' order."""
        return [leaf for _, leaf in self.FlattenItems()]

    def Pack(self, leaves: Iterable[Any]) -> "NestedMap":
        """This structure with other leaves, in Flatten's order; ValueError for another number."""
        leaves = list(leaves)
        expected = len(self.Flatten())
        if len(leaves) != expected:
            raise ValueError(f"Pack: {len(leaves)} leaves given, {expected} expected.")
        return _rebuild(self, iter(leaves))

    def Transform(self, fn: Callable[..., Any], *others: "NestedMap") -> "NestedMap":
        """A tree of the same structure with fn applied to every leaf, and those of `others`."""
        leaves = zip(*(tree.Flatten() for tree in (self, *others)), strict=True)
        return self.Pack(fn(*each) for each in leaves)


def _items(path: str, node: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(node, NestedMap):
        for key in sorted(node):
            yield from _items(f"{path}.{key}" if path else key, node[key])
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from _items(f"{path}[{i}]", item)
    else:
        yield path, node


def _rebuild(node: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(node, NestedMap):
        return NestedMap({key: _rebuild(node[key], leaves) for key in sorted(node)})
    if isinstance(node, list):
        return [_rebuild(item, leaves) for item in node]
    return next(leaves)
