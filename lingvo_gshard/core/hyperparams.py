"""Params: a tree of named, described hyperparameters, as in Lingvo.

p = Params()
p.Define("model_dim", REQUIRED, "M.")
p.Set(model_dim=1024)
p.model_dim  # 1024
"""

import ast
import copy
import difflib
import enum
from collections.abc import Iterator
from typing import Any, Self


class _Required(enum.Enum):
    """The type of REQUIRED: the value of a hyperparameter that its user must set."""

    REQUIRED = "required"


REQUIRED: Any = _Required.REQUIRED


class Params:
    """Named hyperparameters, each defined once with a default and a description."""

    # Written into __dict__, since __setattr__ sets hyperparameters.
    _values: dict[str, Any]
    _defaults: dict[str, Any]
    _descriptions: dict[str, str]
    _optional: dict[str, type | None]
    _frozen: bool

    def __init__(self) -> None:
        self.__dict__.update(
            _values={}, _defaults={}, _descriptions={}, _optional={}, _frozen=False
        )

    def Define(
        self, name: str, default: Any, description: str, *, optional: type | None = None
    ) -> None:
        """Defines hyperparameter `name`, an identifier that is not defined yet.

        A setting must have the type of `default`; with `optional`, it may be of that type or None.
        Raises ValueError for another name, or if frozen.
        """
        self._check_mutable()
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"A hyperparameter's name must be an identifier, got {name!r}.")
        if name in self._values:
            raise ValueError(f"Hyperparameter {name!r} is defined already.")

        self._values[name] = default
        self._defaults[name] = default
        self._descriptions[name] = description
        self._optional[name] = optional

    def Set(self, **values: Any) -> Self:
        """Sets values by dotted name; AttributeError for an unknown one, ValueError if frozen."""
        for path, value in values.items():
            owner, name = self._owner(path)
            setattr(owner, name, value)
        return self

    def Get(self, path: str) -> Any:
        """Returns the value at a dotted path; AttributeError as for Set."""
        owner, name = self._owner(path)
        return getattr(owner, name)

    def Copy(self) -> Self:
        """Returns a deep copy that is not frozen."""
        return copy.deepcopy(self)._set_frozen(False)

    def Freeze(self) -> Self:
        """Makes this tree immutable, and returns it."""
        return self._set_frozen(True)

    def ToText(self) -> str:
        """Returns one `path : value` line per leaf, sorted, as in goldens and logs."""
        return "".join(f"{path} : {_text(value)}\n" for path, value in sorted(self.Leaves()))

    def DefaultsText(self) -> str:
        """Returns ToText() with each leaf's default in place of its value.

        A leaf whose default is REQUIRED, or a tree of Params, has no line.
        """
        defaults = sorted(self._default_leaves(""))
        return "".join(f"{path} : {_text(default)}\n" for path, default in defaults)

    def _default_leaves(self, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in self._values.items():
            default = self._defaults[name]
            if isinstance(value, Params):
                yield from value._default_leaves(f"{prefix}{name}.")
            elif default is not REQUIRED and not isinstance(default, Params):
                yield f"{prefix}{name}", default

    def Leaves(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yields (dotted path, value) of every hyperparameter that is not itself Params."""
        for name, value in self._values.items():
            path = f"{prefix}{name}"
            if isinstance(value, Params):
                yield from value.Leaves(path + ".")
            else:
                yield path, value

    def Describe(self, name: str) -> str:
        """Returns the description given to Define; AttributeError for an unknown name."""
        self._check_defined(name)
        return self._descriptions[name]

    def _owner(self, path: str) -> tuple["Params", str]:
        """Returns the Params that define the last name of a dotted path, and that name."""
        owner: Any = self
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
            if not isinstance(owner, Params):
                raise AttributeError(f"{path!r}: {parent!r} is {owner!r}, no group of settings.")
        return owner, name

    def _set_frozen(self, frozen: bool) -> Self:
        self.__dict__["_frozen"] = frozen
        for value in self._values.values():
            if isinstance(value, Params):
                value._set_frozen(frozen)
        return self

    def _check_mutable(self) -> None:
        if self._frozen:
            raise ValueError("These Params are frozen: Copy() them to change a value.")

    def _check_defined(self, name: str) -> None:
        if name not in self._values:
            # Without a similar name, all of them are listed.
            near = difflib.get_close_matches(name, self._values, n=3) or sorted(self._values)
            raise AttributeError(f"No hyperparameter {name!r}; did you mean {', '.join(near)}?")

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_mutable()
        self._check_defined(name)
        self._values[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle probe for such names before __init__ ran.
            raise AttributeError(name)
        self._check_defined(name)
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Params) and self.ToText() == other.ToText()

    __str__ = ToText


class InstantiableParams(Params):
    """Params that know the class they configure."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.Define("cls", cls, "The class these Params configure.")

    def Instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns `cls(params, ...)`; ValueError if a REQUIRED value of this level is not set."""
        missing = [name for name, value in self._values.items() if value is REQUIRED]
        if missing:
            raise ValueError(f"{self.cls.__name__}: set {', '.join(missing)} before Instantiate().")
        return self.cls(self, *args, **kwargs)


def _text(value: Any) -> str:
    """Returns a value as in ToText: a repr that is the same in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    # The repr of a function has an address.
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, dict):
        inner = ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value))
        return "{" + inner + "}"
    return repr(value)


def differences(ours: str, theirs: str, defaults: str = "") -> list[str]:
    """Returns the lines in which two ToText() differ, as `path: A, not B`, sorted by path.

    Settings that only ours have are absent in theirs, unless `defaults`, our DefaultsText(), has
    them: then theirs have these values.
    """
    our_values = _parsed_text(ours)
    their_values = _parsed_text(defaults) | _parsed_text(theirs)

    lines: list[str] = []
    for path in sorted(our_values.keys() | their_values.keys()):
        our_value = our_values.get(path, "absent")
        their_value = their_values.get(path, "absent")
        if our_value != their_value:
            lines.append(f"{path}: {our_value}, not {their_value}")
    return lines


def _parsed_text(text: str) -> dict[str, str]:
    """Returns the values of a ToText() by path."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        if line:
            path, value = line.split(" : ", 1)
            values[path] = value
    return values


def parse_setting(setting: str) -> tuple[str, object]:
    """Returns the path and the value of `path=value`; ValueError without a path or `=`.

    The value is a Python literal or else a string.
    """
    path, separator, text = setting.partition("=")
    if not separator or not path:
        raise ValueError(f"--set={setting}: expected path=value, such as train.max_steps=500.")

    try:
        return path, ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):  # Such as a name or a path, without quotes.
        return path, text


def apply_setting(params: Params, setting: str) -> None:
    """Applies a `path=value` setting; ValueError for an unknown path or a value of another type."""
    path, value = parse_setting(setting)

    # An unknown path is an AttributeError, with the nearest names.
    try:
        owner, name = params._owner(path)
        old = getattr(owner, name)
    except AttributeError as error:
        raise ValueError(f"--set={setting}: {error}") from error

    if isinstance(old, Params):
        paths = [inner for inner, _ in old.Leaves(f"{path}.")]
        raise ValueError(
            f"--set={setting}: {path} is a group of settings; set one of them, such as "
            f"{', '.join(paths[:3])}."
        )

    # An enum is set by a member's name.
    if isinstance(old, enum.Enum) and old is not REQUIRED:
        members = type(old).__members__
        if str(value) not in members:
            raise ValueError(f"--set={setting}: {path} is one of {', '.join(members)}.")
        value = members[str(value)]

    # A type is known from the old value or, where that may be None, from Define.
    optional = owner._optional[name]
    kind = optional or type(old)
    if old is REQUIRED or kind is type(None):
        raise ValueError(f"--set={setting}: {path} cannot be set; the program fills it in.")
    if kind is float and type(value) is int:
        value = float(value)

    # The type itself: bool is a subclass of int, but a number must not be set to True.
    is_accepted = type(value) is kind or (value is None and optional is not None)
    if not is_accepted:
        expected = f"{kind.__name__} or None" if optional else kind.__name__
        raise ValueError(
            f"--set={setting}: {path} is {old!r}; expected {expected}, "
            f"got {type(value).__name__}. {owner.Describe(name)}"
        )
    setattr(owner, name, value)
