"""Rebuilds dataclasses from the JSON of their `dataclasses.asdict`."""

import dataclasses
import typing
from typing import Any


def read(kind: Any, value: Any) -> Any:
    """Rebuilds a value of type `kind`, such as a dataclass, from JSON's objects and lists.

    Raises KeyError if a field without a default is missing, and TypeError or AttributeError if the
    value has another structure. Keys that are no fields are ignored.
    """
    inner = typing.get_args(kind)
    if value is not None and type(None) in inner:
        return read(inner[0], value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        types = typing.get_type_hints(kind).items()
        # A field's default is an attribute of the class.
        given = {name: each for name, each in types if name in value or not hasattr(kind, name)}
        return kind(**{name: read(each, value[name]) for name, each in given.items()})
    if typing.get_origin(kind) is tuple:
        return tuple(read(inner[0], each) for each in value)
    if typing.get_origin(kind) is dict:
        return {name: read(inner[1], each) for name, each in value.items()}
    return value
