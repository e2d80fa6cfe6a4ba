"""Registered experiments: names to Params.

A module of the `params` package registers its classes; `toy.MoE8E4L` is class MoE8E4L of
params/toy.py. Importing happens on the first look-up.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import Protocol, TypeVar

from lingvo_gshard.core.hyperparams import Params


class Experiment(Protocol):
    """What can be registered: a class whose `params()` gives the whole experiment."""

    @classmethod
    def params(cls) -> Params: ...


_Class = TypeVar("_Class", bound=type[Experiment])
_experiments: dict[str, type[Experiment]] = {}


def register(cls: _Class) -> _Class:
    """Registers an experiment class under `<module>.<Class>`, the module's last name.

    Raises:
      ValueError: the name is taken by another class.
    """
    name = f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"
    taken = _experiments.get(name)
    if taken is not None and taken is not cls:
        raise ValueError(f"Experiment {name!r} is registered already, by {taken.__module__}.")
    _experiments[name] = cls
    return cls


def registered_names() -> list[str]:
    """All names, sorted."""
    _import_experiments()
    return sorted(_experiments)


def get_class(name: str) -> type[Experiment]:
    """The class registered as `name`.

    Raises:
      ValueError: no such experiment; names the nearest ones and lists all.
    """
    names = registered_names()
    if name not in _experiments:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"No model {name!r}.{hint} Registered are {', '.join(names)}.")
    return _experiments[name]


def get_params(name: str) -> Params:
    """The Params of the experiment registered as `name`; ValueError as get_class."""
    return get_class(name).params()


def _import_experiments() -> None:
    import params

    for module in pkgutil.iter_modules(params.__path__, "params."):
        importlib.import_module(module.name)
