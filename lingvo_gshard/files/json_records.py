"""Rebuilds dataclasses from the JSON of their `dataclasses.asdict`."""

import dataclasses
import functools
import typing
from typing import Any


def read(kind: Any, value: Any) -> Any:
    """Rebuilds a value of type `kind`, such as a dataclass, from JSON's objects and lists.

    Other keys are ignored. KeyError for a missing field, TypeError or AttributeError otherwise.
    """
    origin, inner = _structure(kind)
    if origin is dataclasses:
        given = (each for each in inner if not each[2] or each[0] in value)
        return kind(**{name: read(each, value[name]) for name, each, _ in given})
    if value is not None and type(None) in inner:
        return read(inner[0], value)
    if origin is tuple:
        return tuple(read(inner[0], each) for each in value)
    if origin is dict:
        return {name: read(inner[1], each) for name, each in value.items()}
    return value


@functools.cache  # A manifest has hundreds of thousands of values of a few types.
def _structure(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A generic type and its arguments; of a dataclass, each field's (name, type, has default)."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        types = typing.get_type_hints(kind).items()
        # A field's default is an attribute of the class.
        return dataclasses, tuple((name, each, hasattr(kind, name)) for name, each in types)
    return typing.get_origin(kind), typing.get_args(kind)
