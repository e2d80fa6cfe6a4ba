"""Checks of arguments: a mistake becomes a ValueError of one line, which begins with `what`."""

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any


def check_type(what: str, value: Any, kind: type | tuple[type, ...], example: str) -> None:
    """Raises ValueError unless `value` has the type; `example` describes the expected value."""
    if not isinstance(value, kind):
        raise ValueError(f"{what}: expected {example}, got {type(value).__name__} {value!r:.60}.")


def check_each(what: str, values: Any, kind: type, example: str) -> None:
    """Raises ValueError unless `values` is a list or tuple of values of the type.

    A wrong element is named by its position, from 0.
    """
    check_type(what, values, (list, tuple), example)
    for i, value in enumerate(values):
        check_type(f"{what}[{i}]", value, kind, kind.__name__)


def check_count(what: str, value: Any) -> None:
    """Raises ValueError unless `value` is a whole number, 1 or more."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole:
        raise ValueError(f"{what} must be a whole number, 1 or more, got {value!r}.")
    if value < 1:
        raise ValueError(f"{what} must be 1 or more, got {value}.")


def check_takes(what: str, fn: Callable[..., Any], names: Sequence[str]) -> None:
    """Raises ValueError unless `fn` can be called with so many positional arguments."""
    expected = f"expected a function of ({', '.join(names)})"
    if not callable(fn):
        raise ValueError(f"{what}: {expected}, got {type(fn).__name__}.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # A function in C may have no signature.
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ValueError(f"{what}: {expected}: {error}.") from None
