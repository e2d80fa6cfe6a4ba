"""Definitions of settings: a default, a description, and the type that text must have.

class Params(BaseLayer.Params):
    hidden_dim: int = setting(REQUIRED, "H, the hidden dimension.")
    group_size: int | None = setting(None, "S; None chooses one.")
"""

import dataclasses
import difflib
import enum
import inspect
import numbers
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Self, TypeVar

_T = TypeVar("_T")


class _Required(enum.Enum):
    """The type of REQUIRED: the value of a hyperparameter that its user must set."""

    REQUIRED = "required"


REQUIRED: Any = _Required.REQUIRED

# The types of the values that text can set, besides enums.
_KINDS = (bool, int, float, str, tuple, list, dict)
# Values in Python may be NumPy's numbers (but not its bools), and any sequence may be a list.
_VALUES: dict[type, Any] = {
    int: numbers.Integral,
    float: numbers.Real,
    tuple: (tuple, list),
    list: (tuple, list),
}


@dataclasses.dataclass(frozen=True)
class Definition:
    """A setting's default and description, and its type as far as the author declares it."""

    default: Any
    description: str
    kind: type | None = None  # A type that text can set; None for the type of the value.
    is_optional: bool = False  # Whether None is accepted, too.

    def kind_of(self, value: Any) -> type | None:
        """Returns the type that text must have to replace `value`; None if text cannot set it."""
        kind = self.kind or type(value)
        return kind if value is not REQUIRED and _is_text_kind(kind) else None

    def expected(self, kind: type) -> str:
        """Returns the type of a setting as a user may read it, such as `int or None`."""
        if issubclass(kind, enum.Enum):
            name = "|".join(kind.__members__)
        else:
            name = kind.__name__
        return f"{name} or None" if self.is_optional else name

    def check(self, where: str, value: Any) -> None:
        """Raises ValueError, which begins with `where`, unless `value` has the declared type."""
        if self.kind is None or value is REQUIRED or self._accepts(self.kind, value):
            return
        raise ValueError(
            f"{where}: expected {self.expected(self.kind)}, got {type(value).__name__} "
            f"{value!r:.60}. {self.description}"
        )

    def _accepts(self, kind: type, value: Any) -> bool:
        if value is None:
            return self.is_optional
        if isinstance(value, bool):  # A subclass of int.
            return kind is bool
        return isinstance(value, _VALUES.get(kind, kind))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns itself: Params copy a default before they use it."""
        return self


def suggestion(name: str, names: Collection[str], group: str = "") -> str:
    """Returns the names that `name` may mean, or all names if none is similar, in a group."""
    near = difflib.get_close_matches(name, names, n=3)
    paths = [f"{group}{other}" for other in near or sorted(names)]
    return f"did you mean {' or '.join(paths)}?" if near else f"expected one of {', '.join(paths)}."


def setting(default: _T, description: str) -> _T:
    """Declares a setting in the body of a class of Params, beside its name and type.

    A value of type `X | None` may be None. mypy sees the setting's type, not this Definition.
    """
    return typing.cast(_T, Definition(default, description))


def declared(params_class: type, inherited: Mapping[str, Definition]) -> dict[str, Definition]:
    """Takes the settings out of the body of a class, and returns them with the inherited ones.

    `name: type = setting(default, description)` declares a setting. `name = value` changes the
    default of an inherited one. Raises ValueError if the class assigns to an unknown name, if the
    type or description of a setting is missing, or if it is declared already.
    """
    definitions = dict(inherited)
    annotations = inspect.get_annotations(params_class, eval_str=True)
    body = {name: value for name, value in vars(params_class).items() if not name.startswith("_")}

    for name in annotations.keys() - body.keys():
        if not name.startswith("_"):
            raise ValueError(
                f"{params_class.__qualname__}.{name}: expected a default and a description, "
                f"{name}: TYPE = setting(DEFAULT, DESCRIPTION)."
            )

    for name, value in body.items():
        if isinstance(value, Definition) or name in inherited:
            where = f"{params_class.__qualname__}.{name}"
            definitions[name] = _definition(
                where, value, annotations.get(name), inherited.get(name)
            )
            # Values are in the instances.
            delattr(params_class, name)
        elif not hasattr(value, "__get__") and not isinstance(value, type):  # Not a method.
            raise ValueError(
                f"{params_class.__qualname__}.{name} = {value!r}: no inherited setting has this "
                f"name; {suggestion(name, inherited)} A new one is declared by {name}: TYPE = "
                "setting(DEFAULT, DESCRIPTION)."
            )
    return definitions


def _definition(
    where: str, value: Any, annotation: Any, inherited: Definition | None
) -> Definition:
    """Returns the definition of one setting in the body of a class.

    Raises ValueError if its type is missing, or if an inherited setting is declared again.
    """
    is_new = isinstance(value, Definition)
    if is_new and inherited is not None:
        raise ValueError(f"{where} is declared already; NAME = VALUE changes its default.")
    if is_new and annotation is None:
        raise ValueError(f"{where}: expected a type, NAME: TYPE = setting(DEFAULT, DESCRIPTION).")

    definition = value if inherited is None else dataclasses.replace(inherited, default=value)
    if annotation is None:
        return definition
    kind, is_optional = _kind(annotation)
    return dataclasses.replace(definition, kind=kind, is_optional=is_optional)


def _kind(annotation: Any) -> tuple[type | None, bool]:
    """Returns the type that text must have for an annotated setting, and whether it may be None.

    The type is None if text cannot express it, or if there are several.
    """
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    possible = [member for member in members if member is not types.NoneType]
    if len(possible) != 1:
        return None, False

    kind = typing.get_origin(possible[0]) or possible[0]
    if not isinstance(kind, type) or not _is_text_kind(kind):
        return None, False
    return kind, len(possible) < len(members)


def _is_text_kind(kind: type) -> bool:
    return kind in _KINDS or issubclass(kind, enum.Enum)
