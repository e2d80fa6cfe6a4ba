"""Params: a tree of named, described hyperparameters, as in Lingvo.

A class declares its settings with their types, which editors and mypy know:

class Params(BaseLayer.Params):
    model_dim: int = setting(REQUIRED, "M.")

Or they are defined one by one, and mypy does not know them:

p = Params()
p.Define("model_dim", REQUIRED, "M.")
p.Set(model_dim=1024)
p.model_dim  # 1024
"""

import ast
import copy
import dataclasses
import difflib
import enum
import math
import numbers
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from lingvo_gshard.core import definitions
from lingvo_gshard.core.definitions import REQUIRED as REQUIRED
from lingvo_gshard.core.definitions import Definition
from lingvo_gshard.core.definitions import setting as setting


@dataclasses.dataclass(frozen=True)
class Setting:
    """A hyperparameter that a user may set."""

    path: str
    value: Any
    kind: str  # The type's name, perhaps `or None`, or an enum's members.
    description: str
    group: str  # The description of the Params that contain it.


class BaseParams:
    """Named hyperparameters, each with a default and a description: the verbs of all Params.

    A subclass declares its hyperparameters in its body; see `setting`.
    """

    _declared: ClassVar[dict[str, Definition]] = {}

    # Written into __dict__, since __setattr__ sets hyperparameters.
    _values: dict[str, Any]
    _definitions: dict[str, Definition]
    _frozen: bool

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._declared = definitions.declared(cls, cls._declared)

    def __init__(self) -> None:
        values = {
            name: copy.deepcopy(definition.default) for name, definition in self._declared.items()
        }
        self.__dict__.update(_values=values, _definitions=dict(self._declared), _frozen=False)

    def Define(self, name: str, default: Any, description: str) -> None:
        """Defines hyperparameter `name`, an identifier that is not defined yet.

        A setting must have the type of `default`. Raises ValueError if `name` is not an identifier
        or is defined already, or if frozen.
        """
        self._check_mutable()
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"A hyperparameter's name must be an identifier, got {name!r}.")
        if name in self._values:
            raise ValueError(f"Hyperparameter {name!r} is defined already.")

        self._values[name] = default
        self._definitions[name] = Definition(default, description)

    def Set(self, **values: Any) -> Self:
        """Sets values by dotted name.

        Raises AttributeError for an unknown name, and ValueError if frozen or if a value does not
        have the type that its setting declares.
        """
        for path, value in values.items():
            owner, name = self._owner(path)
            owner._assign(name, value, path)
        return self

    def SetDefaults(self, **values: Any) -> Self:
        """Sets values by name, and makes them the defaults that DefaultsText() lists.

        Raises the errors of Set.
        """
        self.Set(**values)
        for name, value in values.items():
            definition = self._definitions[name]
            self._definitions[name] = dataclasses.replace(definition, default=value)
        return self

    def Get(self, path: str) -> Any:
        """Returns the value at a dotted path. Raises AttributeError for an unknown path."""
        owner, name = self._owner(path)
        return owner._values[name]

    def Copy(self) -> Self:
        """Returns a deep copy that is not frozen."""
        return copy.deepcopy(self)._set_frozen(False)

    def Freeze(self) -> Self:
        """Makes this tree immutable, and returns it."""
        return self._set_frozen(True)

    def ToText(self) -> str:
        """Returns one `path : value` line per leaf, sorted; goldens and logs have this format."""
        return "".join(f"{path} : {_text(value)}\n" for path, value in sorted(self.Leaves()))

    def DefaultsText(self) -> str:
        """Returns ToText() with each leaf's default in place of its value.

        Leaves whose default is REQUIRED or is itself Params are left out.
        """
        lines = []
        for path, _, definition, _ in self._leaves():
            default = definition.default
            if default is not REQUIRED and not isinstance(default, BaseParams):
                lines.append(f"{path} : {_text(default)}\n")
        return "".join(sorted(lines))

    def Leaves(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yields (dotted path, value) for each hyperparameter that is not itself Params."""
        for path, value, _, _ in self._leaves(prefix):
            yield path, value

    def Settings(self) -> Iterator[Setting]:
        """Yields the settings that a user may change: classes and REQUIRED values are left out."""
        for path, value, definition, group in self._leaves():
            kind = definition.kind_of(value)
            if kind is not None:
                expected = definition.expected(kind)
                yield Setting(path, value, expected, definition.description, group)

    def _leaves(
        self, prefix: str = "", group: str = ""
    ) -> Iterator[tuple[str, Any, Definition, str]]:
        """Yields each leaf's path, value and definition, and the description of its group."""
        for name, value in self._values.items():
            definition = self._definitions[name]
            if isinstance(value, BaseParams):
                yield from value._leaves(f"{prefix}{name}.", definition.description)
            else:
                yield f"{prefix}{name}", value, definition, group

    def Describe(self, name: str) -> str:
        """Returns the description given to Define. Raises AttributeError for an unknown name."""
        self._check_defined(name, name)
        return self._definitions[name].description

    def _owner(self, path: str) -> tuple["BaseParams", str]:
        """Returns the Params that define the last name of a dotted path, and that name.

        Raises AttributeError for an unknown path.
        """
        owner: Any = self
        *parents, name = path.split(".")
        for i, parent in enumerate(parents):
            owner._check_defined(parent, ".".join(parents[: i + 1]))
            owner = owner._values[parent]
            if not isinstance(owner, BaseParams):
                raise AttributeError(f"{path!r}: {parent!r} is {owner!r}, not a group of settings.")
        owner._check_defined(name, path)
        return owner, name

    def _set_frozen(self, frozen: bool) -> Self:
        self.__dict__["_frozen"] = frozen
        for value in self._values.values():
            if isinstance(value, BaseParams):
                value._set_frozen(frozen)
        return self

    def _check_mutable(self) -> None:
        if self._frozen:
            raise ValueError("These Params are frozen: Copy() them to change a value.")

    def _check_defined(self, name: str, path: str) -> None:
        """Raises AttributeError for an unknown name; `path` is where the user wrote it."""
        if name not in self._values:
            suggestion = definitions.suggestion(name, self._values, path.removesuffix(name))
            raise AttributeError(f"No hyperparameter {path!r}; {suggestion}")

    def _assign(self, name: str, value: Any, path: str) -> None:
        """Sets a defined name; an error names `path`."""
        self._check_mutable()
        self._definitions[name].check(path, value)
        self._values[name] = value

    # mypy does not see these, so it reports an attribute that no class declares.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            self._check_defined(name, name)
            self._assign(name, value, name)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # copy and pickle look up such names before __init__ has run.
                raise AttributeError(name)
            self._check_defined(name, name)
            return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BaseParams) and self.ToText() == other.ToText()

    __str__ = ToText


class Params(BaseParams):
    """Hyperparameters that Define adds: mypy takes any attribute, and its type is Any."""

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


# Params of a class that the annotated function does not import; mypy takes any attribute.
AnyParams: TypeAlias = Any


class InstantiableParams(BaseParams):
    """Params that know the class they configure."""

    cls: type[Any] = setting(REQUIRED, "The class these Params configure.")

    def __init__(self, cls: type | None = None) -> None:
        """`cls` may be left out if a Configured class has these Params."""
        super().__init__()
        if cls is not None:
            self.SetDefaults(cls=cls)

    @classmethod
    def SetDefaultClass(cls, configured: type) -> None:
        """Makes `configured` the class that all instances of this class of Params configure."""
        definition = dataclasses.replace(cls._declared["cls"], default=configured)
        cls._declared = {**cls._declared, "cls": definition}

    def Instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns `cls(params, ...)`.

        Raises ValueError if a hyperparameter of this level is still REQUIRED, or is a number that
        is not finite.
        """
        missing = [name for name, value in self._values.items() if value is REQUIRED]
        if missing:
            raise ValueError(f"{self.cls.__name__}: set {', '.join(missing)} before Instantiate().")

        # NaN passes every range check, and infinity passes a check of one bound.
        for name, value in self._values.items():
            if not is_finite(value):
                raise ValueError(f"{self.cls.__name__}: {name} must be finite, got {value}.")
        return self.cls(self, *args, **kwargs)


def is_finite(value: Any) -> bool:
    """Returns False for NaN and the infinities, and True for any other value."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, int)
    return not is_real or math.isfinite(value)


def _text(value: Any) -> str:
    """Returns a value as ToText writes it: a repr that is the same in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    # A function's repr contains an address.
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, dict):
        inner = ", ".join(f"{key}: {_text(value[key])}" for key in sorted(value))
        return "{" + inner + "}"
    return repr(value)


def parse_setting(setting: str) -> tuple[str, object]:
    """Returns the path and the value of `path=value`; the value is a Python literal or a string.

    Raises ValueError if the path or the `=` is missing.
    """
    path, separator, text = map(str.strip, setting.partition("="))
    if not separator or not path:
        raise ValueError(f"--set={setting}: expected path=value, such as train.max_steps=500.")

    try:
        return path, ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):  # A name or a path, say, without quotes.
        return path, text


def apply_setting(params: BaseParams, setting: str) -> None:
    """Applies a `path=value` setting.

    Raises ValueError if the path is unknown or the value has the wrong type.
    """
    path, value = parse_setting(setting)

    # An unknown path is an AttributeError.
    try:
        owner, name = params._owner(path)
        old = owner._values[name]
    except AttributeError as error:
        near = similar(params, path)
        if not near:
            raise ValueError(f"--set={setting}: {error}") from error
        raise ValueError(
            f"--set={setting}: No hyperparameter {path!r}; did you mean {' or '.join(near)}?"
        ) from error

    if isinstance(old, BaseParams):
        paths = [inner for inner, _ in old.Leaves(f"{path}.")]
        raise ValueError(
            f"--set={setting}: {path} is a group of settings; set one of them, such as "
            f"{', '.join(paths[:3])}."
        )

    # The type is the declared one or, without a declaration, the old value's.
    definition = owner._definitions[name]
    kind = definition.kind or type(old)
    if old is REQUIRED or kind is type(None):
        raise ValueError(f"--set={setting}: {path} cannot be set; the program fills it in.")

    # An enum is set by a member's name.
    if issubclass(kind, enum.Enum) and (value is not None or not definition.is_optional):
        if str(value) not in kind.__members__:
            raise ValueError(f"--set={setting}: {path} is one of {', '.join(kind.__members__)}.")
        value = kind[str(value)]
    value = _as_kind(value, kind)

    # `is`, not isinstance: bool is a subclass of int, but a number must not be set to True.
    is_accepted = type(value) is kind or (value is None and definition.is_optional)
    if not is_accepted:
        raise ValueError(
            f"--set={setting}: {path} is {old!r}; expected {definition.expected(kind)}, "
            f"got {type(value).__name__}. {definition.description}"
        )
    setattr(owner, name, value)


def _as_kind(value: Any, kind: type) -> Any:
    """Returns a value with the type of a setting, if that type can express it."""
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():  # 1e3, say.
        return int(value)
    if kind is tuple and type(value) is list:  # TOML writes tuples as lists.
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value


def similar(params: BaseParams, path: str, count: int = 4) -> list[str]:
    """Returns at most `count` paths of settings in the whole tree that a wrong path may mean.

    They have the same last name or a similar one; otherwise, they contain the name, or their
    descriptions contain its words.
    """
    settings = list(params.Settings())
    by_name: dict[str, list[str]] = {}
    for each in settings:
        by_name.setdefault(each.path.rpartition(".")[2], []).append(each.path)

    # A similar name in another group is more likely than another name in the same group.
    name = path.rpartition(".")[2]
    found: list[str] = []
    for near in difflib.get_close_matches(name, by_name, n=2, cutoff=0.75):
        found += sorted(by_name[near], key=lambda other: -_shared(path, other))
    if found:
        return found[:count]

    # A part of a name, such as `vocab_size` or `dropout`; then words of descriptions.
    words = name.replace("_", " ").lower()
    containing = [setting.path for setting in settings if name in setting.path]
    described = [setting.path for setting in settings if words in setting.description.lower()]
    in_group = [setting.path for setting in settings if words in setting.group.lower()]
    is_word = len(name) > 3
    return (containing or described or in_group)[:count] if is_word else []


def _shared(path: str, other: str) -> int:
    """Returns the number of leading groups that two paths share."""
    count = 0
    for group, other_group in zip(path.split("."), other.split("."), strict=False):
        if group != other_group:
            break
        count += 1
    return count
