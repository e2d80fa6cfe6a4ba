"""The table of operators, which the modules of operators/ fill.

An operator is a Python expression with placeholders for its inputs, `{0}`, `{1}` or `{every}`, and
for its attributes. One function draws the inputs and attributes of all operators of a family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.fuzz_programs.draft import Draft, Tensor

# The expressions by the operator's name.
OPERATORS: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Call:
    """The inputs and attributes that were drawn for an operator.

    The integers of its result are from 0 to below - 1, or any if `below` is 0.
    """

    inputs: list[Tensor]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    below: int = 0


@dataclasses.dataclass(frozen=True)
class Family:
    """Operators whose inputs one function draws, and how often the family is chosen."""

    name: str
    operators: tuple[str, ...]
    draw: Callable[[Draft], Call]
    weight: float


FAMILIES: dict[str, Family] = {}


class NoOperands(Exception):
    """The program lacks a tensor that fits the operator."""


def family(
    operators: Mapping[str, str], weight: float = 1.0
) -> Callable[[Callable[[Draft], Call]], Callable[[Draft], Call]]:
    """Decorates the function that draws calls of a family, and registers its operators."""

    def register(draw: Callable[[Draft], Call]) -> Callable[[Draft], Call]:
        name = draw.__name__
        assert name not in FAMILIES and not OPERATORS.keys() & operators.keys(), name
        OPERATORS.update(operators)
        FAMILIES[name] = Family(name, tuple(operators), draw, weight)
        return draw

    return register
