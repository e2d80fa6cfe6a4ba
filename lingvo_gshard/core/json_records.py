"""Rebuilds dataclasses from the JSON of their `dataclasses.asdict`."""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

_Reader = Callable[[Any], Any]


def read(kind: Any, value: Any) -> Any:
    """Rebuilds a value of type `kind`, such as a dataclass, from JSON's objects and lists.

    Raises KeyError if a field without a default is missing, and TypeError or AttributeError if the
    value has another structure. Keys that are no fields are ignored.
    """
    reader = _reader(kind)
    return value if reader is None else reader(value)


@functools.cache  # A manifest has hundreds of thousands of records of a few types.
def _reader(kind: Any) -> _Reader | None:
    """What rebuilds values of a type; None if they are as JSON has them."""
    inner = typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if typing.get_origin(kind) is tuple:
        return lambda value: tuple(read(inner[0], each) for each in value)
    if typing.get_origin(kind) is dict:
        return lambda value: {name: read(inner[1], each) for name, each in value.items()}
    return None


def _dataclass_reader(kind: type) -> _Reader:
    types = typing.get_type_hints(kind)
    # A field's default is an attribute of the class.
    fields = [(name, _reader(types[name]), hasattr(kind, name)) for name in types]

    def rebuild(value: Any) -> Any:
        given = {}
        for name, reader, has_default in fields:
            if name in value or not has_default:
                given[name] = value[name] if reader is None else reader(value[name])
        return kind(**given)

    return rebuild
