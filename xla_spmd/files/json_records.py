"""Reads JSON, and rebuilds dataclasses from the JSON of their `dataclasses.asdict`."""

import collections
import dataclasses
import functools
import json
import typing
from typing import Any


@dataclasses.dataclass(frozen=True)
class _Field:
    """A field of a dataclass: the facts that reading needs."""

    name: str
    type: Any
    has_default: bool


def parse(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises ValueError if it is not JSON, if it is nested too deeply to be read, or if an object has
    the same name twice, where json.loads would silently take the last value.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON. Raises ValueError if a name occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        ((name, _),) = counts.most_common(1)
        raise ValueError(f"an object has the name {name!r} twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def read(kind: Any, value: Any) -> Any:
    """Returns a value of type `kind`, such as a dataclass, from JSON objects and lists.

    Keys that are not fields are ignored. Raises KeyError for a missing field, and TypeError or
    AttributeError for a value of the wrong structure.
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


# Types are inspected only once: a manifest has hundreds of thousands of values of a few types.


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
