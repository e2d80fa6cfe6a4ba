"""Reads JSON, and rebuilds dataclasses from that of their `dataclasses.asdict`."""

import dataclasses
import functools
import json
import typing
from typing import Any


@dataclasses.dataclass(frozen=True)
class _Field:
    """A field of a dataclass, as far as reading needs it."""

    name: str
    type: Any
    has_default: bool


def parse(text: str | bytes) -> Any:
    """Returns JSON's value; ValueError if it is none, also if it is nested too deeply to be read.

    json.loads raises RecursionError then, which is no ValueError.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read(kind: Any, value: Any) -> Any:
    """Returns a value of type `kind`, such as a dataclass, from JSON's objects and lists.

    Keys that are not fields are ignored. Raises KeyError for a missing field, and TypeError or
    AttributeError for a value of another structure.
    """
    fields = _fields(kind)
    if fields is not None:
        values: dict[str, Any] = {}
        for field in fields:
            if field.name in value or not field.has_default:
                values[field.name] = read(field.type, value[field.name])
        return kind(**values)

    origin, arguments = _generic(kind)
    if value is not None and type(None) in arguments:  # `X | None`
        return read(arguments[0], value)
    if origin is tuple:  # `tuple[X, ...]`
        return tuple(read(arguments[0], item) for item in value)
    if origin is dict:  # `dict[str, X]`
        return {key: read(arguments[1], item) for key, item in value.items()}
    return value


# Types are looked at once: a manifest has hundreds of thousands of values of a few types.


@functools.cache
def _fields(kind: Any) -> tuple[_Field, ...] | None:
    """Returns the fields of a dataclass; None for another type."""
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return None
    types = typing.get_type_hints(kind)
    # A field's default is an attribute of the class.
    return tuple(_Field(name, type_, hasattr(kind, name)) for name, type_ in types.items())


@functools.cache
def _generic(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the origin and the arguments of a generic type, such as tuple and (int, ...)."""
    return typing.get_origin(kind), typing.get_args(kind)
