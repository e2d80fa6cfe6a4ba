"""Checks of settings that users write: their names, types, ranges and choices."""

import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

_PLAIN_TYPES = {bool, int, float, str, types.NoneType}
_Result = TypeVar("_Result")


def call(function: Callable[..., _Result], owner: str, fields: Mapping[str, Any]) -> _Result:
    """Calls a function with a table's fields. Raises ValueError if one is missing or unknown."""
    # A format's settings are the arguments of its class, so that each is named in one place only.
    parameters = inspect.signature(function).parameters
    unknown = sorted(fields.keys() - parameters)
    if unknown:
        near = difflib.get_close_matches(unknown[0], parameters)
        known = f"did you mean {near[0]}?" if near else f"only {', '.join(sorted(parameters))}"
        raise ValueError(f"{owner} has no setting {unknown[0]}, {known}")

    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in fields
    ]
    if missing:
        raise ValueError(f"{owner} needs {', '.join(missing)}")

    result = function(**fields)
    if dataclasses.is_dataclass(result):
        field_types(result)
    return result


def field_types(instance: Any) -> None:
    """Raises ValueError if a field has a plain type, or None, and a value of another type."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        kinds: tuple[Any, ...] = (field.type,)
        if isinstance(field.type, types.UnionType):
            kinds = typing.get_args(field.type)
        if float in kinds and type(value) is int:  # In TOML, 1 may stand for 1.0.
            continue
        if set(kinds) <= _PLAIN_TYPES and type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
            raise ValueError(f"{field.name} {value!r}: expected a value of type {expected}")


def in_range(name: str, value: float, least: float, most: float) -> None:
    """Raises ValueError if a value is not from `least` to `most`."""
    if not least <= value <= most:
        expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise ValueError(f"{name} {value!r}: expected {expected}")


def one_of(name: str, value: Any, expected: Sequence[str]) -> None:
    """Raises ValueError if a value is not one of the expected ones."""
    if value not in expected:
        raise ValueError(f"{name} {value!r}: expected one of {', '.join(expected)}")
